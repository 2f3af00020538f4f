"""Drives the pages as a reader and a writer do, with keys and the pointer, and reads what they show.

It calls no function of the pages and reads no state of their modules, but for the text that the editor holds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, FloatRect, Locator, Page, Request, Route, expect

from tests.e2e.harness import PATIENCE_S, Tercet, until
from tests.workers.checkpoints.hub_server import serving

OPENING = "The old man looked at the sea and"  # the model is sure of no next word: ideas come at a pause
SURE = f"{OPENING} shook his"  # " head" follows
TIMEOUT_MS = 1000 * PATIENCE_S
MIN_VISIBLE_MS = 250  # a suggestion can be accepted after 200 ms (shown_suggestions.js)
PHONE = {"viewport": {"width": 360, "height": 720}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
# In Firefox, Playwright adds a style before each screenshot, which the pages' policy blocks: the digest in that error.
SCREENSHOT_STYLE = base64.b64encode(hashlib.sha256(b"body {}").digest()).decode()
expect.set_options(timeout=TIMEOUT_MS)

# The page and this import are given the same module.
STATE = """import("./static/vendor/codemirror.js").then(({ EditorView }) => {
  const { doc, selection } = EditorView.findFromDOM(document.querySelector("#editor")).state;"""
TEXT = STATE + " return doc.toString(); })"
SELECTION = STATE + " return [selection.main.from, selection.main.to]; })"
CARET = STATE + " return selection.main.head; })"


def errors_of(page: Page, *kinds: str) -> list[str]:
    """The errors of a page's scripts, and what it logs of these kinds, such as `error`, from now on."""
    errors: list[str] = []

    def record(kind: str, text: str) -> None:
        # The browser also logs every error status, which the page handles.
        is_expected = "the server responded with a status" in text or SCREENSHOT_STYLE in text
        if kind in kinds and not is_expected:
            errors.append(f"{kind}: {text}")

    page.on("pageerror", lambda error: record("error", str(error)))
    page.on("console", lambda message: record(message.type, message.text))
    return errors


class ObservedPage:
    """A page of the server, open in a browser."""

    def __init__(self, page: Page, tercet: Tercet) -> None:
        page.set_default_timeout(TIMEOUT_MS)
        self.page = page
        self.tercet = tercet
        self.errors = errors_of(page, "error", "warning")  # and requests to other hosts
        page.on("request", self._record_request)

    def _record_request(self, request: Request) -> None:
        if not request.url.startswith((self.tercet.url, "blob:", "data:")):
            self.errors.append(f"request to another host: {request.url}")


class DocsPage(ObservedPage):
    """The documentation page."""

    def __init__(self, page: Page, tercet: Tercet) -> None:
        super().__init__(page, tercet)
        page.set_default_timeout(3 * TIMEOUT_MS)  # the viewer renders an operation for seconds on a busy machine
        self.operations = page.locator(".opblock")

    def operation(self, method: str, path: str) -> Locator:
        """An operation in the list."""
        return self.page.locator(f".opblock-{method.lower()}", has=self.page.locator(f'[data-path="{path}"]'))

    def send(self, operation: Locator, status: int, body: str = "") -> str:
        """Send the request of an open operation, wait for this status, and return the answer as it is shown."""
        if body:
            operation.get_by_role("textbox").and_(operation.locator("textarea")).fill(body)
        operation.get_by_role("button", name="Execute").click()
        answer = operation.locator(".live-responses-table tbody")
        expect(answer.locator(".response-col_status")).to_have_text(str(status))
        return answer.text_content() or ""


class Typist:
    """Types on a page, into its text."""

    page: Page
    text: Locator

    def type(self, text: str) -> None:
        """Focus the text and type a text key by key."""
        self.text.focus()
        self.page.keyboard.type(text)

    def press(self, *keys: str) -> None:
        """Press keys in order, named as in Playwright (`Control+z`)."""
        for key in keys:
            self.page.keyboard.press(key)


class Editor(ObservedPage, Typist):
    """The editor page."""

    def __init__(self, page: Page, tercet: Tercet) -> None:
        super().__init__(page, tercet)
        self.requests: list[dict[str, Any]] = []  # bodies sent to /autocomplete; in Firefox each is empty
        self.ideas: list[dict[str, Any]] = []  # those of requests for one idea, when the writer stands still
        self.text = page.get_by_role("textbox", name="Text")
        self.list = page.get_by_role("listbox", name="Suggestions")
        self.options = self.list.get_by_role("option")
        self.chosen = self.list.get_by_role("option", selected=True)
        self.ghost = page.locator("#editor .tercet-ghost")
        self.announcements = page.locator("#announcements")
        self.status = page.locator("#status")
        self.latency = page.locator("#latency")  # in the settings

    def _record_request(self, request: Request) -> None:
        super()._record_request(request)
        if request.url.endswith("/autocomplete"):
            body = json.loads(request.post_data or "{}")
            is_idea = body.get("strategy") == "idea" and not body.keys() & {"stream", "explain"}
            (self.ideas if is_idea else self.requests).append(body)

    def wait_until_ready(self) -> None:
        """Wait until the page has opened the document, which focuses the text, and knows that the server is ready."""
        expect(self.text).to_be_focused()
        until(lambda: "ready" in self.status.inner_text(), PATIENCE_S, "the page's health check")

    def reload(self) -> None:
        """Reload the page and wait until it has opened the document, which focuses the text."""
        self.page.reload()
        expect(self.text).to_be_focused()

    def request_suggestions(self, text: str = OPENING) -> list[str]:
        """Type a text, ask for suggestions and wait for the complete response; returns them."""
        self.type(text)
        self.press("Alt+Enter")
        return self.wait_for_response()

    def wait_for_num_requests(self, num_requests: int) -> None:
        """Wait until the page has sent this many requests.

        Needed before `wait_for_response` when a pause sends the request: until it does, the settings still show the
        latency of the previous response.
        """

        def has_sent() -> bool:
            self.status.inner_text()  # Playwright delivers request events only during a call
            return len(self.requests) >= num_requests

        until(has_sent, PATIENCE_S, f"{num_requests} requests")

    def wait_for_response(self) -> list[str]:
        """Wait until the settings show the latency of a complete response; returns the suggestions."""
        until(
            lambda: re.fullmatch(r"[\d,]+ ms", self.latency.text_content() or ""), PATIENCE_S, "the complete response"
        )
        expect(self.options.first).to_be_visible()
        self.page.wait_for_timeout(MIN_VISIBLE_MS)
        return self.suggestions

    @property
    def value(self) -> str:
        """The text, without ghost text. Of a long one the page shows only a part, so CodeMirror is asked."""
        value: str = self.page.evaluate(TEXT)
        return value

    @property
    def selection(self) -> tuple[int, int]:
        """The selection's ends, as positions in the text."""
        start, end = self.page.evaluate(SELECTION)
        return start, end

    @property
    def caret(self) -> int:
        """The caret's position in the text, in UTF-16 code units."""
        position: int = self.page.evaluate(CARET)
        return position

    @property
    def suggestions(self) -> list[str]:
        """The visible options of the suggestion panel."""
        return self.options.all_inner_texts()

    @property
    def ghost_text(self) -> str:
        """The rest of the chosen suggestion, drawn at the caret."""
        return "".join(self.ghost.all_text_contents())


def editor_context(tercet: Tercet, settings: dict[str, object]) -> dict[str, Any]:
    """A new browser context for the page: no stored data but the settings."""
    stored = [{"name": "tercet.settings", "value": json.dumps(settings)}]
    state = {"cookies": [], "origins": [{"origin": tercet.url, "localStorage": stored}]}
    return {"storage_state": state, "viewport": {"width": 1100, "height": 760}}


def open_editor(browser: Browser, tercet: Tercet) -> Editor:
    """The page with requests on demand, in a new browser context."""
    editor = Editor(browser.new_context(**editor_context(tercet, {"mode": "off"})).new_page(), tercet)
    editor.page.goto(tercet.url)
    editor.wait_until_ready()
    return editor


# The pulse of a streaming suggestion never ends.
FADE_IN = """() => {
  const finite = document.getAnimations().filter((each) => each.effect.getComputedTiming().endTime < Infinity);
  return Promise.allSettled(finite.map((each) => each.finished)).then(() => null);
}"""


def violations(page: Page) -> list[dict[str, Any]]:
    """What axe-core reports for a page in its present state, once nothing fades in: half-faded text lacks contrast."""
    page.evaluate(FADE_IN)
    return [
        {"id": rule["id"], "impact": rule["impact"], "nodes": [node["html"][:200] for node in rule["nodes"]]}
        for rule in Axe().run(page).response["violations"]
    ]


def answer_with(page: Page, *values: str) -> None:
    """Let the server answer every request with these sentences, so that what is accepted is known."""
    sentences = [{"value": value, "seed": seed, "branch": seed} for seed, value in enumerate(values)]
    answer = {"id": "1", "sentences": sentences}
    events = "".join(f"event: sentence\ndata: {json.dumps(sentence)}\n\n" for sentence in sentences)
    stream = f"{events}event: done\ndata: {json.dumps(answer)}\n\n"

    def fulfill(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        is_streamed = body.get("stream", False)
        headers = {"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Headers": "*"}
        kind = "text/event-stream" if is_streamed else "application/json"
        known = answer if is_streamed or body.get("strategy") == "predict" else {"id": "1", "sentences": []}  # no idea
        route.fulfill(body=stream if is_streamed else json.dumps(known), content_type=kind, headers=headers)

    page.route("**/autocomplete", fulfill)
    page.route("**/feedback", fulfill)


class InputMethod:
    """Composes text in the focused field, as Chromium passes it on from the system's input method."""

    def __init__(self, page: Page) -> None:
        self.session = page.context.new_cdp_session(page)

    def compose(self, text: str) -> None:
        """Replace the composed text."""
        place = {"selectionStart": len(text), "selectionEnd": len(text)}
        self.session.send("Input.imeSetComposition", {"text": text, **place})

    def commit(self, text: str) -> None:
        """End the composition with this text."""
        self.session.send("Input.insertText", {"text": text})

    def press(self, key: str, code: str) -> None:
        """Press a key that the input method takes."""
        event = {"key": key, "code": code, "windowsVirtualKeyCode": 229}
        for kind in ("rawKeyDown", "keyUp"):
            self.session.send("Input.dispatchKeyEvent", {"type": kind, **event})


def box(element: Locator) -> FloatRect:
    """Where an element is drawn."""
    found = element.bounding_box()
    assert found
    return found


@dataclass(frozen=True)
class StaticSite:
    """An HTTP server for a folder, on its own port and therefore of another origin than Tercet."""

    folder: Path
    origin: str


@contextmanager
def static_site(folder: Path) -> Iterator[StaticSite]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=str(folder)))) as server:
        yield StaticSite(folder, f"http://127.0.0.1:{server.server_port}")


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
