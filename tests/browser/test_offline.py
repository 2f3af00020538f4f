"""The editor while its server is gone: it reloads from the browser's cache with the text, says that the server does not
respond, and takes a new version as a whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import falcon
import pytest
from playwright.sync_api import Browser, Page, expect

from gateway.api.page import INDEX, STATIC, AssetResource, StaticResource, read_assets, service_worker
from tests.browser.driver import OPENING, Editor, open_editor
from tests.e2e.harness import PATIENCE_S, Tercet, free_port, running, until
from tests.workers.checkpoints.hub_server import serving

GONE = "The server is not responding."
CACHED_URLS = """async () => {
    const caches_ = await Promise.all((await caches.keys()).map(name => caches.open(name)));
    const requests = await Promise.all(caches_.map(cache => cache.keys()));
    return requests.map(found => found.map(request => new URL(request.url).pathname).sort());
}"""


@pytest.fixture(scope="module")
def tercet(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """An instance that is killed and started again; the last test stops it."""
    with running(tmp_path_factory.mktemp("t")) as instance:
        yield instance


@pytest.fixture
def editor(browser: Browser, tercet: Tercet) -> Iterator[Editor]:
    editor = open_editor(browser, tercet)
    yield editor
    editor.page.context.close()


def kill(tercet: Tercet) -> None:
    """Kill every process at once, as a power failure does."""
    for process in [process for role in tercet.processes().values() for process in role]:
        process.kill()
    tercet.process.wait(timeout=10)
    until(lambda: tercet.ready() is None, PATIENCE_S, "no server at the port")


def restart(tercet: Tercet) -> None:
    tercet.start()
    tercet.wait_until_warm()


def wait_until_cached(page: Page) -> None:
    page.evaluate("navigator.serviceWorker.ready")
    until(
        lambda: page.evaluate("navigator.serviceWorker.ready.then(({ active }) => active.state === 'activated')"),
        PATIENCE_S,
        "an active service worker",
    )


def test_nothing_is_lost_when_the_server_is_killed_and_the_page_is_reloaded(tercet: Tercet, editor: Editor) -> None:
    page = editor.page
    wait_until_cached(page)
    editor.request_suggestions()
    ghost = editor.ghost_text
    editor.press("Enter")
    editor.type(" – and more,\nwith “marks” 🙂.")
    expected = f"{OPENING}{ghost} – and more,\nwith “marks” 🙂."
    kill(tercet)
    editor.type(" Typed after that.")
    editor.press("Alt+Enter")
    expect(editor.status).to_contain_text(GONE)
    assert "ready" not in editor.status.inner_text()
    for addition in ("", " And after a reload."):
        editor.press("Control+End")
        editor.page.keyboard.insert_text(addition)
        expected_now = f"{expected} Typed after that.{addition}"
        editor.reload()
        expect(editor.status).to_contain_text(GONE)
        assert editor.value == expected_now
        expect(page.get_by_role("button", name=re.compile("^Documents"))).to_contain_text(OPENING)
    editor.type(" Still works.")
    restart(tercet)
    expect(editor.status).to_contain_text("ready")
    expect(editor.status).not_to_contain_text(GONE)
    editor.press("Alt+Enter")
    editor.wait_for_response()
    assert editor.value == f"{expected_now} Still works."


def test_a_request_that_succeeds_shows_that_the_server_is_back(editor: Editor) -> None:
    page = editor.page
    editor.type(OPENING)
    expect(editor.status).to_contain_text("ready")
    # The health check fails while requests succeed: here, the browser's connections are cut for the check alone.
    page.route("**/health/ready", lambda route: route.abort())
    page.evaluate("dispatchEvent(new Event('online'))")
    expect(editor.status).to_contain_text(GONE)
    page.unroute("**/health/ready")
    editor.press("Alt+Enter")
    editor.wait_for_response()
    expect(editor.status).to_contain_text("ready")
    assert "respond" not in editor.status.inner_text()


def test_only_the_editors_own_files_are_cached(tercet: Tercet, editor: Editor) -> None:
    page = editor.page
    wait_until_cached(page)
    editor.request_suggestions()
    for path in ("/docs", "/health/ready", "/"):
        page.goto(tercet.url + path)
    (paths,) = page.evaluate(CACHED_URLS)
    names = [path.relative_to(STATIC) for path in STATIC.rglob("*.*") if path.suffix not in {".html", ".txt"}]
    assert paths == sorted(["/", *(f"/static/{name}" for name in names if name.stem != "swagger-ui")])
    assert tercet.stop() == 0
    page.goto(f"{tercet.url}/?from=a-bookmark")
    expect(editor.status).to_contain_text(GONE)
    assert page.evaluate("fetch('health/ready').then(() => 'answered', () => 'failed')") == "failed"


# ---- upgrades ----


class PageServer:
    """Serves a version of the editor, with the gateway's resources, at the same address as the version before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._app: Any = None
        self.refuses_all_but_the_page = False
        self.port = free_port()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/" or not self.refuses_all_but_the_page:
            return self._app(environ, start_response)
        start_response("503 Service Unavailable", [])
        return []

    def install(self, version: str, *, stale: str = "") -> None:
        """Serve a version from now on. The file `stale` is still that of the version before."""
        before = (self._folder / stale).read_bytes() if stale else None
        shutil.copytree(STATIC, self._folder, dirs_exist_ok=True)
        index, script, style = (self._folder / name for name in ("index.html", "page.js", "style.css"))
        index.write_text(index.read_text().replace("<html ", f'<html data-page="{version}" '))
        script.write_text(f'{script.read_text()}\ndocument.documentElement.dataset.script = "{version}";\n')
        style.write_text(f'{style.read_text()}\nhtml {{ --style: "{version}"; }}\n')
        assets = read_assets(self._folder)
        app = falcon.App()
        app.add_route("/service_worker.js", AssetResource(service_worker(assets), "The service worker"))
        if before is not None:
            (self._folder / stale).write_bytes(before)
            assets = read_assets(self._folder)
        app.add_route("/", AssetResource(assets[INDEX], "The page"))
        app.add_route("/static/{name}", StaticResource(assets))
        app.add_route("/static/vendor/{name}", StaticResource(assets, "vendor/"))
        self._app = app

    @contextmanager
    def running(self, page: Page) -> Iterator[None]:
        """Serve the versions; the page is open and cached when the block begins."""
        with serving(make_server("127.0.0.1", self.port, self._answer, _ThreadingServer, _QuietHandler)):
            page.goto(f"http://127.0.0.1:{self.port}/")
            wait_until_cached(page)
            yield


class _ThreadingServer(ThreadingHTTPServer, WSGIServer):
    """One thread per request."""


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def server(tmp_path: Path) -> PageServer:
    server = PageServer(tmp_path / "static")
    server.install("1")
    return server


def versions(page: Page) -> tuple[str, str, str]:
    """The versions of the page, its script and its style sheet."""
    found: list[str] = page.evaluate(
        """() => {
            const { dataset } = document.documentElement;
            const style = getComputedStyle(document.documentElement).getPropertyValue("--style");
            return [dataset.page, dataset.script ?? "none", style.replaceAll('"', "").trim()];
        }"""
    )
    return found[0], found[1], found[2]


def num_cached(page: Page, version: str) -> int:
    """Caches that hold this version of the page."""
    script = """version => caches.keys()
        .then(names => Promise.all(names.map(name => caches.open(name))))
        .then(found => Promise.all(found.map(cache => cache.match(location.origin + "/"))))
        .then(pages => Promise.all(pages.filter(page => page).map(page => page.text())))
        .then(texts => texts.filter(text => text.includes(`data-page="${version}"`)).length)"""
    found: int = page.evaluate(script, version)
    return found


def test_an_upgrade_replaces_page_and_cache_as_a_whole(server: PageServer, page: Page) -> None:
    with server.running(page):
        assert versions(page) == ("1", "1", "1")
        server.install("2")
        page.reload()
        assert versions(page) == ("2", "2", "2")
        until(lambda: (num_cached(page, "1"), num_cached(page, "2")) == (0, 1), PATIENCE_S, "the cache is replaced")
    page.reload()
    assert versions(page) == ("2", "2", "2")


def test_an_upgrade_under_way_is_not_cached(server: PageServer, page: Page) -> None:
    """The service worker is new, but a file is still old, as behind a balancer of two gateways."""
    with server.running(page):
        server.install("2", stale="page.js")
        page.evaluate("navigator.serviceWorker.ready.then(one => one.update()).catch(() => {})")
        until(
            lambda: page.evaluate("navigator.serviceWorker.ready.then(one => !one.installing && !one.waiting)"),
            PATIENCE_S,
            "the end of the installation",
        )
        assert num_cached(page, "1") == 1
    page.reload()
    assert versions(page) == ("1", "1", "1")


def test_a_page_of_a_new_version_gets_no_cached_file_of_the_old_one(server: PageServer, page: Page) -> None:
    with server.running(page):
        server.install("2")
        server.refuses_all_but_the_page = True
        page.reload()
        assert versions(page) == ("2", "none", "")
    page.reload()
    assert versions(page) == ("1", "1", "1")
