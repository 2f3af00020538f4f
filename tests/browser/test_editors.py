"""The packed npm package in a textarea, CodeMirror and ProseMirror, bundled into pages of another origin."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from tests.browser.driver import OPENING, TIMEOUT_MS, StaticSite, answer_with
from tests.e2e.harness import Tercet, until
from tests.npm_package import NpmPackage

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


# As a key's event arrives, and whether the page left it to the browser.
DISPATCH_KEY = """(event) => document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", {bubbles: true, cancelable: true, ...event}),
)"""


class EditorPage:
    """One editor, alone on a page with a button after it."""

    def __init__(self, page: Page, name: str, is_framed: bool) -> None:
        self.page = page
        self.is_textarea = name == "textarea"
        root = page.frame_locator("iframe") if is_framed else page
        self.text = root.locator(SELECTORS[name])
        self.items = root.locator("ol li")
        self.ghost = root.locator(".tercet-ghost")
        self.announcements = root.locator(".cm-announced, [role=status]")
        self.requests: list[dict[str, Any]] = []  # bodies sent to /autocomplete
        self.num_finished = 0
        self.num_aborted = 0
        self.errors: list[str] = []
        page.on("request", self._record_request)
        page.on("requestfinished", self._record_end)
        page.on("requestfailed", self._record_abort)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._record_console_error)

    def _record_console_error(self, message: ConsoleMessage) -> None:
        # The browser also logs every error status, such as the one of a superseded request.
        if message.type == "error" and "the server responded with a status" not in message.text:
            self.errors.append(message.text)

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
        until(lambda: (self.page.title(), condition())[1], 10, what)

    @property
    def value(self) -> str:
        """The document. A text editor's lines and a block's spaces are as they were typed."""
        text = self.text.input_value() if self.is_textarea else str(self.text.evaluate(READ_BLOCKS))
        return text.replace("\u00a0", " ")

    def type(self, text: str) -> None:
        self.text.click()
        self.page.keyboard.type(text)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def wait_for_list(self) -> list[str]:
        """Wait until three suggestions are listed, complete and visible long enough to be accepted; returns them."""
        expect(self.items).to_have_count(3)
        self.wait_for_responses()
        self.page.wait_for_timeout(READING_MS)
        return self.items.all_text_contents()

    def wait_for_two_words(self) -> None:
        """As `wait_for_list`; then choose a suggestion with a space after its first word."""
        suggestions = self.wait_for_list()
        [place, *_] = [place for place, text in enumerate(suggestions) if re.match(r"\w+ \w", text)]
        for _ in range(place):
            self.page.keyboard.press("Alt+ArrowDown")

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


@pytest.fixture(scope="session")
def bundles(npm_package: NpmPackage, site: StaticSite) -> None:
    npm_package.bundle(sorted(SOURCES.glob("*.ts")), site.folder / "bundles")
    for name in EDITORS:
        (site.folder / f"{name}.html").write_text(PAGE.format(name=name))


@pytest.fixture
def open_editor(
    browser: Browser, site: StaticSite, tercet: Tercet, bundles: None
) -> Iterator[Callable[..., EditorPage]]:
    """Opens an editor's page, by default without unasked requests. Teardown fails if a script of a page failed."""
    opened: list[EditorPage] = []

    def open_new(
        name: str, *, mode: str = "off", model: str = "embedded", is_framed: bool = False, file: str = "", **more: str
    ) -> EditorPage:
        page = browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        editor = EditorPage(page, name, is_framed)
        opened.append(editor)
        framed = {"framed": 1} if is_framed else {}
        query = urlencode({"server": tercet.url, "mode": mode, "model": model, **framed, **more})
        page.goto(f"{site.origin}/{file or name}.html?{query}")
        return editor

    yield open_new
    for editor in opened:
        editor.page.context.close()
        assert not editor.errors


each_editor = pytest.mark.parametrize("name", EDITORS)


@each_editor
def test_request_choose_accept_and_undo(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    suggestions = editor.wait_for_list()
    editor.press("ArrowDown")
    expect(editor.items.nth(1)).to_have_attribute("aria-current", "true")
    if not editor.is_textarea:
        assert (editor.ghost.text_content() or "").strip() == suggestions[1]
        expect(editor.announcements).to_have_text(f"Suggestion 2 of 3: {suggestions[1]}")
    editor.press("ArrowRight")
    with_word = editor.value
    word = with_word.removeprefix(OPENING).strip()
    assert suggestions[1].startswith(word)
    assert len(suggestions[1]) > len(word) > 0
    editor.press("Tab")
    accepted = editor.value
    assert accepted.removeprefix(OPENING).strip() == suggestions[1]
    expect(editor.items).to_have_count(0)
    editor.page.keyboard.type("Then")
    assert editor.value == f"{accepted}Then"
    for value in (accepted, with_word, OPENING):
        editor.press("Control+z")
        assert editor.value == value
    editor.press("Control+y")
    assert editor.value == with_word
    assert len(editor.requests) == 1


@each_editor
def test_the_list_shows_whole_words(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name)
    editor.type("The old man looked at the se")
    editor.press("Alt+Enter")
    words = editor.wait_for_list()
    assert all(word.startswith("se") for word in words)
    editor.press("ArrowDown")
    expect(editor.items.nth(1)).to_have_attribute("aria-current", "true")
    if not editor.is_textarea:
        expect(editor.announcements).to_have_text(f"Suggestion 2 of 3: {words[1]}")
    editor.press("Enter")
    assert editor.value.strip() == f"The old man looked at the {words[1]}"


@each_editor
def test_the_list_follows_the_color_scheme(open_editor: Callable[..., EditorPage], name: str) -> None:
    """CodeMirror gives its tooltips a light background, on which light text could not be read."""
    editor = open_editor(name)
    editor.page.evaluate("document.documentElement.style.colorScheme = 'dark'")
    editor.type(OPENING)
    editor.press("Alt+Enter")
    editor.wait_for_list()
    background, text = editor.items.first.evaluate(
        """(item) => {
          const list = item.closest(".tercet-list");
          return [getComputedStyle(list).backgroundColor, getComputedStyle(item).color];
        }"""
    )
    assert (background, text) == ("rgb(36, 34, 32)", "rgb(232, 227, 216)")


@each_editor
def test_suggestions_while_typing_and_none_after_undo_and_deletion(
    open_editor: Callable[..., EditorPage], name: str
) -> None:
    editor = open_editor(name, mode="live")
    editor.type(OPENING)
    editor.wait_for_unasked()
    if not editor.is_textarea:
        assert editor.announcements.text_content() == ""  # a screen reader would interrupt the typing
    editor.press("Tab")
    accepted = editor.value
    assert accepted.startswith(OPENING)
    assert accepted != OPENING
    assert editor.requests[-1]["context"].startswith(OPENING)
    editor.page.wait_for_timeout(QUIET_MS)
    num_requests = len(editor.requests)
    for keys, value in (("Control+z", OPENING), ("Control+y", accepted), ("Control+z", OPENING)):
        editor.press(keys)
        assert editor.value == value
    editor.press("Backspace")
    assert editor.value == OPENING[:-1]
    editor.page.wait_for_timeout(QUIET_MS)
    assert len(editor.requests) == num_requests
    expect(editor.ghost).to_have_count(0)
    expect(editor.items).to_have_count(0)
    editor.page.keyboard.type("d")
    editor.wait_for_unasked()
    assert len(editor.requests) == num_requests + 1


@each_editor
def test_a_composition_is_left_alone_until_it_ends(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name, mode="live")
    editor.type(OPENING)
    editor.wait_for_unasked()
    num_requests = len(editor.requests)
    ime = editor.page.context.new_cdp_session(editor.page)
    for text in ("に", "にほ", "にほん"):
        ime.send("Input.imeSetComposition", {"text": text, "selectionStart": len(text), "selectionEnd": len(text)})
    assert editor.value == f"{OPENING}にほん"
    expect(editor.ghost).to_have_count(0)
    editor.page.wait_for_timeout(QUIET_MS)
    assert len(editor.requests) == num_requests
    ime.send("Input.insertText", {"text": "日本"})
    editor.wait_for_num_requests(num_requests + 1)
    assert editor.value == f"{OPENING}日本"
    assert editor.requests[-1]["context"] == f"{OPENING}日本"
    editor.page.wait_for_timeout(QUIET_MS)
    num_requests = len(editor.requests)
    ime.send("Input.imeSetComposition", {"text": "の", "selectionStart": 1, "selectionEnd": 1})
    ime.send("Input.insertText", {"text": "の"})  # ends without another change
    editor.wait_for_num_requests(num_requests + 1)
    assert editor.value == f"{OPENING}日本の"
    assert editor.requests[-1]["context"] == f"{OPENING}日本の"


@each_editor
def test_a_composed_word_that_will_stand_is_followed_and_accepted(
    open_editor: Callable[..., EditorPage], name: str
) -> None:
    """As on a touch screen, where a suggestion is tapped and every word is composed."""
    editor = open_editor(name, mode="live")
    editor.type(f"{OPENING} ")
    editor.wait_for_unasked()
    ime = editor.page.context.new_cdp_session(editor.page)
    for text in ("q", "qu", "qui"):  # no idea begins with these: it would be followed without requests
        num_requests = len(editor.requests)
        ime.send("Input.imeSetComposition", {"text": text, "selectionStart": len(text), "selectionEnd": len(text)})
        editor.wait_for_num_requests(num_requests + 1)
        assert editor.requests[-1]["context"] == f"{OPENING} {text}"
    editor.wait_for_unasked()
    expect(editor.items.first).to_be_visible()
    editor.wait_for_responses()
    editor.page.wait_for_timeout(READING_MS)
    for key in ("Enter", "ArrowDown", "Tab", "Escape"):  # the input method's
        event = {"key": key, "code": key, "windowsVirtualKeyCode": 229}
        ime.send("Input.dispatchKeyEvent", {"type": "rawKeyDown", **event})
    assert editor.value == f"{OPENING} qui"
    if name == "textarea":  # beside ghost text the list has alternatives only
        expect(editor.items.first).to_have_attribute("aria-current", "true")
    typed = editor.items.first.locator(".tercet-typed").text_content() or ""
    rest = (editor.items.first.text_content() or "").removeprefix(typed)
    assert typed in {"qui", ""}  # a part of a word, or a word that the suggestion follows
    editor.items.first.click()
    accepted = editor.value
    assert re.sub(r"\s", "", accepted) == re.sub(r"\s", "", f"{OPENING} qui{rest}")
    editor.page.keyboard.type("x")
    assert editor.value == f"{accepted}x"
    editor.press("Control+z")
    if name != "codemirror":  # it joins what is typed next with what was inserted during a composition
        editor.press("Control+z")
    assert editor.value == f"{OPENING} qui"


def test_keys_of_an_input_method_are_left_to_it(open_editor: Callable[..., EditorPage]) -> None:
    """Safari ends the composition before it sends the key: only the key code is the input method's."""
    editor = open_editor("textarea")
    editor.type(OPENING)
    editor.press("Alt+Enter")
    suggestions = editor.wait_for_list()
    for key in ("Enter", "Tab", "Escape", "ArrowDown", "ArrowUp", "ArrowRight"):
        for whose in ({"isComposing": True}, {"keyCode": 229}, {"isComposing": True, "keyCode": 229}):
            for alt in (False, True):
                assert editor.page.evaluate(DISPATCH_KEY, {"key": key, "code": key, "altKey": alt, **whose})
            assert editor.value == OPENING
            assert editor.items.all_text_contents() == suggestions
            expect(editor.items.first).to_have_attribute("aria-current", "true")
    assert not editor.page.evaluate(DISPATCH_KEY, {"key": "Enter", "code": "Enter"})
    assert editor.value != OPENING


@each_editor
def test_a_character_of_the_layout_is_the_editors(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    editor.wait_for_list()
    session = editor.page.context.new_cdp_session(editor.page)
    event = {"key": "#", "code": "Digit3", "windowsVirtualKeyCode": 51, "modifiers": 1}
    session.send("Input.dispatchKeyEvent", {"type": "keyDown", "text": "#", **event})
    assert editor.value == f"{OPENING}#"


@each_editor
def test_escape_then_tab_leaves(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    editor.wait_for_list()
    editor.press("Escape")
    expect(editor.items).to_have_count(0)
    editor.press("Escape")
    if name == "codemirror":
        editor.page.wait_for_timeout(2100)  # CodeMirror itself gives Tab away for 2 s after Escape
    editor.press("Tab")
    expect(editor.page.get_by_role("button")).to_be_focused()
    assert editor.value == OPENING
    assert len(editor.requests) == 1
    editor.press("Shift+Tab", "Alt+Enter")
    editor.wait_for_list()
    assert editor.value == OPENING


@each_editor
def test_the_space_after_a_word_gives_way(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    editor.wait_for_two_words()
    editor.press("Alt+ArrowRight")
    with_space = editor.value
    assert with_space.endswith(" ")
    editor.press("!")
    assert editor.value == f"{with_space.rstrip()}!"
    editor.press("Control+z")
    assert editor.value == with_space
    editor.press("Control+z", "Alt+Enter")
    editor.wait_for_two_words()
    editor.press("Alt+ArrowRight")
    with_space = editor.value
    assert with_space.endswith(" ")
    editor.press("Space")
    assert editor.value == with_space
    editor.press("x")
    assert editor.value == f"{with_space}x"


@each_editor
def test_enter_is_the_editors_after_a_word_was_taken(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name, mode="live")
    editor.type("On the other")  # " hand, the"
    editor.wait_for_unasked()
    editor.press("Alt+ArrowRight")
    taken = editor.value
    assert len(taken) > len("On the other")
    expect(editor.items.first if editor.is_textarea else editor.ghost).to_be_visible()  # the rest
    editor.press("ArrowRight")
    assert editor.value == taken
    editor.press("Enter")
    assert [line.rstrip() for line in editor.value.split("\n")] == [taken.rstrip(), ""]


@each_editor
def test_a_click_and_a_chord_accept_the_item_with_that_number(
    open_editor: Callable[..., EditorPage], name: str
) -> None:
    editor = open_editor(name)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    suggestion = editor.wait_for_list()[2]
    assert editor.items.nth(2).evaluate("(item) => item.value") == 3
    editor.items.nth(2).click()
    assert editor.value.removeprefix(OPENING).strip() == suggestion
    editor.press("Control+z", "Alt+Enter")
    suggestion = editor.wait_for_list()[1]
    editor.press("Alt+2")
    assert editor.value.removeprefix(OPENING).strip() == suggestion


@each_editor
def test_closing_the_editor_aborts_the_request(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name, model="slow")
    editor.type(OPENING)
    editor.press("Alt+Enter")
    expect(editor.items.first).to_be_visible()
    editor.press("F8")
    editor.wait_for_num_aborted(1)
    expect(editor.items).to_have_count(0)
    editor.press("Alt+Enter")  # no listener is left to request or prevent
    assert len(editor.requests) == 1
    if not editor.is_textarea:
        expect(editor.page.locator(".tercet-list, .tercet-ghost")).to_have_count(0)


@pytest.mark.parametrize("name", ["codemirror", "prosemirror"])
def test_a_read_only_editor_has_no_suggestions(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    editor.wait_for_list()
    editor.press("F9")
    expect(editor.items).to_have_count(0)
    expect(editor.ghost).to_have_count(0)
    editor.press("Alt+1", "Tab")
    assert editor.value == OPENING
    assert len(editor.requests) == 1


@pytest.mark.parametrize("name", ["codemirror", "prosemirror"])
def test_selected_text_is_the_editors(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    editor.wait_for_list()
    editor.press("Shift+ArrowLeft")
    expect(editor.items).to_have_count(0)
    expect(editor.ghost).to_have_count(0)
    editor.press("Tab")
    assert "\t" in editor.value or editor.value.startswith("  ")
    assert len(editor.requests) == 1


@pytest.mark.parametrize("name", ["codemirror", "prosemirror"])
def test_an_editor_in_a_frame(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name, is_framed=True)
    editor.type(OPENING)
    editor.press("Alt+Enter")
    suggestion = editor.wait_for_list()[2]
    colors = [
        locator.evaluate("(element) => getComputedStyle(element).color") for locator in (editor.text, editor.ghost)
    ]
    assert colors[0] != colors[1]
    caret, item = editor.ghost.bounding_box(), editor.items.first.bounding_box()
    assert caret
    assert item
    assert item["y"] >= caret["y"]
    assert item["width"] > 150  # not squeezed between the caret and the edge of the frame, which is 300 pixels wide
    editor.items.nth(2).click()
    assert editor.value.removeprefix(OPENING).strip() == suggestion
    editor.page.keyboard.type("Then")
    assert editor.value.endswith("Then")


@each_editor
def test_a_suggestion_of_two_lines(open_editor: Callable[..., EditorPage], name: str) -> None:
    """The response is a stand-in: no seed of the model yields a line break in every version."""
    editor = open_editor(name)
    answer_with(editor.page, " fell silent.\nThen he spoke.")
    editor.type(OPENING)
    editor.press("Alt+Enter")
    expect(editor.items).to_have_count(1)
    editor.page.wait_for_timeout(READING_MS)
    editor.press("Enter")
    accepted = f"{OPENING} fell silent.\nThen he spoke."
    assert editor.value.rstrip() == accepted
    if name == "prosemirror":
        expect(editor.text.locator("p")).to_have_count(2)
    editor.page.keyboard.type("Again")
    editor.press("Control+z")
    assert editor.value.rstrip() == accepted
    editor.press("Control+z")
    assert editor.value == OPENING
