"""Fixtures: real browsers, and a Tercet server for all browser tests with a fast and an artificially slow slot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tests.browser.driver import (
    TIMEOUT_MS,
    Editor,
    ObservedPage,
    StaticSite,
    answer_with,
    editor_context,
    static_site,
)
from tests.browser.editor_pages import EDITORS, PAGE, SOURCES, EditorPage, OpenEditor
from tests.e2e.harness import ROOT, Tercet, running
from tests.npm_package import NpmPackage
from tests.programs import CHROMIUM

# No background requests (updates, component lists, first-run pages). No sandbox and no GPU, because tests often run as
# root in a container.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")


@pytest.fixture(scope="session")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser(playwright: Playwright) -> Iterator[Browser]:
    """The browser of `open_page`: Chromium, unless a test module has a fixture of this name."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium-headless-shell)")
    with playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def launch_firefox(playwright: Playwright) -> Callable[..., Browser]:
    """Starts Firefox with the given preferences.

    They replace Playwright's emulation of media, which it lacks for Firefox: `browser.display.document_color_use` 2
    means forced colors, `layout.css.prefers-color-scheme.content-override` 0 dark and 1 light. It also lacks touch and
    the bodies of requests.
    """
    if FIREFOX is None:
        pytest.skip("Firefox is not installed (apt-get install firefox-esr)")

    def launch(**preferences: bool | int | str) -> Browser:
        # The channel: an unpatched Firefox, driven by WebDriver BiDi.
        return playwright.firefox.launch(
            channel="moz-firefox", executable_path=FIREFOX, firefox_user_prefs=dict(preferences)
        )

    return launch


@pytest.fixture(scope="session")
def firefox(launch_firefox: Callable[..., Browser]) -> Iterator[Browser]:
    with launch_firefox() as firefox:
        yield firefox


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaticSite]:
    """Pages of another origin, which `TERCET_ORIGINS` lists."""
    with static_site(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="session")
def tercet(site: StaticSite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """Two models: `embedded`, and `slow`, the same checkpoint with at least 30 ms per decode step."""
    models = f"embedded,slow={ROOT}/workers/checkpoints/embedded"
    base = tmp_path_factory.mktemp("t")
    with running(base, models=models, test_step_delay_ms="1=30", origins=site.origin) as instance:
        yield instance


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page in a browser context of its own. Teardown fails if a script failed."""
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.context.close()
    assert not errors


@pytest.fixture
def observe(browser: Browser, tercet: Tercet) -> Iterator[Callable[..., ObservedPage]]:
    """Opens a page of the server in a browser context of its own.

    Teardown fails if a page logged an error or sent a request to another host.
    """
    opened: list[ObservedPage] = []

    def open_new(kind: type[ObservedPage], path: str, **context: Any) -> ObservedPage:
        opened.append(kind(browser.new_context(**context).new_page(), tercet))
        opened[-1].page.goto(tercet.url + path)
        return opened[-1]

    yield open_new
    for observed in opened:
        observed.page.context.close()
        assert not observed.errors


@pytest.fixture
def open_page(observe: Callable[..., Editor], tercet: Tercet) -> Callable[..., Editor]:
    """Opens the page in a browser that has only the given settings stored; see `observe`."""

    def open_new(*, context: dict[str, object] | None = None, **settings: object) -> Editor:
        editor = observe(Editor, "/", **editor_context(tercet, settings) | (context or {}))
        editor.wait_until_ready()
        return editor

    return open_new


@pytest.fixture
def editor(open_page: Callable[..., Editor]) -> Editor:
    """The page without automatic requests: only Tab and the Suggest button send requests."""
    return open_page(mode="off")


@pytest.fixture
def slow_editor(open_page: Callable[..., Editor]) -> Editor:
    """Like `editor`, with the slow model."""
    return open_page(mode="off", model_size="slow")


@pytest.fixture(scope="session")
def bundles(npm_package: NpmPackage, site: StaticSite) -> None:
    npm_package.bundle(sorted(SOURCES.glob("*.ts")), site.folder / "bundles")
    for name in EDITORS:
        (site.folder / f"{name}.html").write_text(PAGE.format(name=name))


@pytest.fixture
def open_editor(browser: Browser, site: StaticSite, tercet: Tercet, bundles: None) -> Iterator[OpenEditor]:
    """Opens an editor's page, by default without unasked requests; answers are in place of the server's. Teardown fails
    if a script of a page failed."""
    opened: list[EditorPage] = []

    def open_new(
        name: str,
        *answers: str,
        mode: str = "off",
        model: str = "embedded",
        is_framed: bool = False,
        file: str = "",
        **more: str,
    ) -> EditorPage:
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        editor = EditorPage(page, name, is_framed)
        opened.append(editor)
        framed = {"framed": 1} if is_framed else {}
        query = urlencode({"server": tercet.url, "mode": mode, "model": model, **framed, **more})
        page.goto(f"{site.origin}/{file or name}.html?{query}")
        if answers:
            answer_with(page, *answers)
        return editor

    yield open_new
    for editor in opened:
        editor.page.context.close()
        assert not editor.errors


@pytest.fixture(params=EDITORS)
def open_each(request: pytest.FixtureRequest, open_editor: OpenEditor) -> OpenEditor:
    """Opens the page of one of the editors; the test runs once for each."""
    return partial(open_editor, request.param)


@pytest.fixture(params=[name for name in EDITORS if name != "textarea"])
def open_drawing(request: pytest.FixtureRequest, open_editor: OpenEditor) -> OpenEditor:
    """As `open_each`, for the editors that draw ghost text."""
    return partial(open_editor, request.param)
