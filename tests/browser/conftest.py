"""Fixtures: real browsers, and a Tercet server for all browser tests with a fast and an artificially slow slot."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Playwright, sync_playwright

from tests.browser.driver import Editor, StaticSite, open_editor
from tests.e2e.harness import ROOT, Tercet, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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
        pytest.skip("Chromium is not installed (apt-get install chromium)")
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
    with StaticSite(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="session")
def tercet(site: StaticSite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """Two models: `embedded`, and `slow`, the same checkpoint with at least 30 ms per decode step."""
    models = f"embedded,slow={ROOT}/workers/checkpoints/embedded"
    base = tmp_path_factory.mktemp("t")
    with running(base, models=models, test_step_delay_ms="1=30", origins=site.origin) as instance:
        yield instance


@pytest.fixture
def open_page(browser: Browser, tercet: Tercet) -> Iterator[Callable[..., Editor]]:
    """Opens the page in a browser that has only the given settings stored.

    Teardown fails if a page logged an error or sent a request to another host.
    """
    editors: list[Editor] = []

    def open_new(*, context: dict[str, object] | None = None, **settings: object) -> Editor:
        editor = open_editor(browser, tercet, settings, context or {})
        editors.append(editor)
        return editor

    yield open_new
    for editor in editors:
        editor.page.context.close()
        assert not editor.errors


@pytest.fixture
def editor(open_page: Callable[..., Editor]) -> Editor:
    """The page without automatic requests: only Tab and the Suggest button send requests."""
    return open_page(mode="off")


@pytest.fixture
def slow_editor(open_page: Callable[..., Editor]) -> Editor:
    """Like `editor`, with the slow model."""
    return open_page(mode="off", model_size="slow")
