"""The page as a person uses it: keys pressed, and what is to be seen then. Calls nothing of the page's own."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from tests.e2e.harness import Tercet, until

OPENING = "The old man looked at the sea and"
TIMEOUT_MS = 10_000
expect.set_options(timeout=TIMEOUT_MS)


class Editor:
    """The page, open in a browser."""

    def __init__(self, page: Page, tercet: Tercet) -> None:
        self.page = page
        self.tercet = tercet
        self.faults: list[str] = []
        self.asked: list[dict[str, Any]] = []  # bodies of the requests for suggestions
        self.text = page.get_by_role("combobox", name="Text")
        self.list = page.get_by_role("listbox", name="Suggestions")
        self.options = self.list.get_by_role("option")
        self.chosen = self.list.get_by_role("option", selected=True)
        self.ghost = page.locator("#mirror .ghost")
        self.news = page.locator("#announcements")
        self.status = page.locator("#status")
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", self._hear)
        page.on("request", self._see)

    def _hear(self, message: ConsoleMessage) -> None:
        # A refusal is reported by the browser too; the page is to handle it.
        if message.type in {"error", "warning"} and "the server responded with a status" not in message.text:
            self.faults.append(f"{message.type}: {message.text}")

    def _see(self, request: Request) -> None:
        if not request.url.startswith((self.tercet.url, "blob:", "data:")):
            self.faults.append(f"foreign request: {request.url}")
        if request.url.endswith("/autocomplete"):
            self.asked.append(json.loads(request.post_data or "{}"))

    def write(self, text: str) -> None:
        """Key by key."""
        self.text.focus()
        self.page.keyboard.type(text)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def ask(self, text: str = OPENING) -> list[str]:
        """Write, press Tab, wait for the whole answer; the suggestions."""
        self.write(text)
        self.press("Tab")
        return self.wait_until_whole()

    def wait_until_asked(self, number: int) -> None:
        """For a pause to ask: until then, what was answered before is still whole."""

        def is_asked() -> bool:
            self.status.inner_text()  # Playwright hears of requests while it is asked for something
            return len(self.asked) >= number

        until(is_asked, 10, "the pause's request")

    def wait_until_whole(self) -> list[str]:
        latency = self.page.locator("#latency")
        until(lambda: re.fullmatch(r"[\d,]+ ms", latency.inner_text()), 10, "the whole answer")
        expect(self.options.first).to_be_visible()
        return self.suggestions

    @property
    def value(self) -> str:
        return self.text.input_value()

    @property
    def suggestions(self) -> list[str]:
        return self.options.all_inner_texts()

    @property
    def ghost_text(self) -> str:
        return self.ghost.text_content() or ""


def open_editor(browser: Browser, tercet: Tercet, settings: dict[str, object], context: dict[str, object]) -> Editor:
    stored = [{"name": "tercet.settings", "value": json.dumps(settings)}]
    state: Any = {"cookies": [], "origins": [{"origin": tercet.url, "localStorage": stored}]}
    options: Any = {"viewport": {"width": 1100, "height": 760}, **context}
    page = browser.new_context(storage_state=state, **options).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    editor = Editor(page, tercet)
    page.goto(tercet.url)
    until(lambda: "ready" in editor.status.inner_text(), 10, "the page's look at the server")
    return editor


class Site:
    """A folder, served to browsers on a port of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        handler = partial(_Quiet, directory=str(folder))
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.origin = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Site:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
