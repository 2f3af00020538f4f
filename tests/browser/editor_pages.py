"""The packed npm package in an editor on a page of another origin: what a test types into it and reads from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Request, expect

from tests.browser.driver import OPENING, Typist, answer_with, errors_of
from tests.e2e.harness import PATIENCE_S, until

SOURCES = Path(__file__).with_name("editors")
EDITORS = ("textarea", "codemirror", "prosemirror")
SELECTORS = {"textarea": "textarea", "codemirror": ".cm-content", "prosemirror": ".ProseMirror"}
PAGE = """<!doctype html><meta charset="utf-8"><title>{name}</title><link rel="icon" href="data:,">
<style>textarea, .cm-editor, .ProseMirror {{ width: 600px; height: 200px; white-space: pre-wrap }}</style>
<button>Next</button><script src="bundles/{name}.js"></script>"""
# Text that is not in the document is left out.
READ_BLOCKS = """(element) => Array.from(element.children, (block) => {
  const copy = block.cloneNode(true);
  for (const ghost of copy.querySelectorAll(".tercet-ghost")) ghost.remove();
  return copy.textContent;
}).join("\\n")"""
READING_MS = 250  # suggestions that were visible for less than 200 ms cannot be accepted
QUIET_MS = 400  # longer than an adapter takes to send a request for a change


class EditorPage(Typist):
    """One editor, alone on a page with a button after it."""

    def __init__(self, page: Page, name: str, is_framed: bool) -> None:
        self.page = page
        self.name = name
        self.is_textarea = name == "textarea"
        root = page.frame_locator("iframe") if is_framed else page
        self.text = root.locator(SELECTORS[name])
        self.items = root.locator("ol li")
        self.ghost = root.locator(".tercet-ghost")
        self.announcements = root.locator(".cm-announced, [role=status]")
        self.requests: list[dict[str, Any]] = []  # bodies sent to /autocomplete
        self.num_finished = 0
        self.num_aborted = 0
        self.errors = errors_of(page, "error")
        page.on("request", self._record_request)
        page.on("requestfinished", self._record_end)
        page.on("requestfailed", self._record_abort)

    def _record_request(self, request: Request) -> None:
        if request.method == "POST" and request.url.endswith("/autocomplete"):
            body = json.loads(request.post_data or "{}")
            if body.get("strategy") == "predict" or "stream" in body:  # else one idea: the writer stands still
                self.requests.append(body)
            else:
                self.num_finished -= 1

    def _record_end(self, request: Request) -> None:
        self.num_finished += request.method == "POST" and request.url.endswith("/autocomplete")

    def _record_abort(self, request: Request) -> None:
        self.num_aborted += request.url.endswith("/autocomplete")

    def _wait_until(self, condition: Callable[[], object], what: str) -> None:
        # Playwright delivers events only during a call.
        until(lambda: (self.page.title(), condition())[1], PATIENCE_S, what)

    @property
    def value(self) -> str:
        """The document. A text editor's lines and a block's spaces are as they were typed."""
        text = self.text.input_value() if self.is_textarea else str(self.text.evaluate(READ_BLOCKS))
        return text.replace("\u00a0", " ")

    def request(self, text: str = OPENING, *, num_listed: int = 3) -> list[str]:
        """Type a text, request suggestions, and wait for them as `wait_for_list` does."""
        self.type(text)
        self.press("Alt+Enter")
        return self.wait_for_list(num_listed)

    def type_before(self, text: str, *suggestions: str) -> None:
        """Type a text with these answers to each request, and wait until one can be accepted."""
        answer_with(self.page, *suggestions)
        self.type(text)
        self.wait_for_unasked()

    def wait_for_list(self, num_listed: int = 3) -> list[str]:
        """Wait until so many suggestions are listed, complete and visible long enough to be accepted; returns them."""
        expect(self.items).to_have_count(num_listed)
        self.wait_for_responses()
        self.page.wait_for_timeout(READING_MS)
        return self.items.all_text_contents()

    def wait_for_responses(self) -> None:
        """Wait until no request is in flight."""
        self._wait_until(lambda: self.num_finished + self.num_aborted >= len(self.requests), "the responses")

    def wait_for_num_requests(self, num_requests: int) -> None:
        """Wait until this many requests have been sent."""
        self._wait_until(lambda: len(self.requests) >= num_requests, f"{num_requests} requests")

    def wait_for_num_aborted(self, num_aborted: int) -> None:
        """Wait until this many requests have been aborted."""
        self._wait_until(lambda: self.num_aborted >= num_aborted, f"{num_aborted} aborted requests")

    def wait_for_unasked(self) -> None:
        """Wait until a suggestion came by itself and has been visible long enough to be accepted."""
        expect(self.items.first if self.is_textarea else self.ghost).to_be_visible()
        self.page.wait_for_timeout(READING_MS)


OpenEditor = Callable[..., EditorPage]
