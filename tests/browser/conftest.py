"""A real Chromium, and one Tercet for all browser tests: a fast slot, and one whose steps can be watched."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.driver import Editor, Site, open_editor
from tests.e2e.harness import ROOT, Tercet, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# A browser that looks nothing up: no updates, no lists, no first-run pages. Tests often run as root, and in
# containers, where there is neither a sandbox of its own nor a GPU.
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Somebody else's pages, of an origin that Tercet lists."""
    with Site(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="session")
def tercet(browser: Browser, site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """The model `slow` takes 30 ms and more for a step; `embedded`, the same checkpoint, as long as it needs."""
    models = f"embedded,slow={ROOT}/workers/checkpoints/embedded"
    base = tmp_path_factory.mktemp("t")
    with running(base, models=models, test_step_delay_ms="1=30", origins=site.origin) as instance:
        yield instance


@pytest.fixture
def open_page(browser: Browser, tercet: Tercet) -> Iterator[Callable[..., Editor]]:
    """Opens the page, in a browser that knows nothing of it but the settings given. At the end no page may have
    failed anywhere, or have asked another host for anything."""
    editors: list[Editor] = []

    def open_one(*, context: dict[str, object] | None = None, **settings: object) -> Editor:
        editor = open_editor(browser, tercet, settings, context or {})
        editors.append(editor)
        return editor

    yield open_one
    for editor in editors:
        editor.page.context.close()
        assert not editor.faults


@pytest.fixture
def editor(open_page: Callable[..., Editor]) -> Editor:
    """The page, with suggestions by Tab alone."""
    return open_page(pauses=False)


@pytest.fixture
def slow_editor(open_page: Callable[..., Editor]) -> Editor:
    return open_page(pauses=False, model_size="slow")
