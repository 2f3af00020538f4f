"""Compositions, keys of input methods and layouts, and right-to-left text, in the page's editor."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from playwright.sync_api import CDPSession, expect

from tests.browser.driver import MIN_VISIBLE_MS, OPENING, SURE, Editor, answer_with
from tests.e2e.harness import PATIENCE_S, until

QUIET_MS = 400  # longer than the page takes to send a request for a change


class InputMethod:
    """Composes text in the focused field, as Chromium passes it on from the system's input method."""

    def __init__(self, editor: Editor) -> None:
        self._editor = editor
        self._session: CDPSession = editor.page.context.new_cdp_session(editor.page)

    def compose(self, text: str) -> None:
        """Replace the composed text."""
        place = {"selectionStart": len(text), "selectionEnd": len(text)}
        self._session.send("Input.imeSetComposition", {"text": text, **place})

    def compose_each(self, texts: Iterable[str]) -> None:
        """Compose these, and wait for the request of each."""
        for text in texts:
            num_requests = len(self._editor.requests)
            self.compose(text)
            self._editor.wait_for_num_requests(num_requests + 1)

    def commit(self, text: str) -> None:
        """End the composition with this text."""
        self._session.send("Input.insertText", {"text": text})

    def press(self, key: str, code: str) -> None:
        """Press a key that the input method takes."""
        event = {"key": key, "code": code, "windowsVirtualKeyCode": 229}
        self._session.send("Input.dispatchKeyEvent", {"type": "rawKeyDown", **event})
        self._session.send("Input.dispatchKeyEvent", {"type": "keyUp", **event})


@pytest.fixture
def live(open_page: Callable[..., Editor]) -> Editor:
    editor = open_page(mode="eager")
    editor.type(f"{SURE} ")
    until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")
    return editor


@pytest.fixture
def input_method(live: Editor) -> InputMethod:
    return InputMethod(live)


def assert_no_request(editor: Editor, num_requests: int) -> None:
    editor.page.wait_for_timeout(QUIET_MS)
    assert len(editor.requests) == num_requests


# ---- compositions ----


def test_each_letter_of_a_word_that_will_stand_requests_predictions(live: Editor, input_method: InputMethod) -> None:
    texts = ("d", "don", "don’t")
    input_method.compose_each(texts)
    assert [body["context"] for body in live.requests[-len(texts) :]] == [f"{SURE} {text}" for text in texts]
    assert {body["strategy"] for body in live.requests} == {"predict"}


def test_ghost_text_grows_with_a_composed_word_and_stays_at_its_end(live: Editor, input_method: InputMethod) -> None:
    ghost = live.ghost_text
    input_method.compose_each(ghost[:end] for end in (1, 2))
    assert live.ghost_text == ghost[2:]
    num_requests = len(live.requests)
    input_method.commit(ghost[:2])
    assert_no_request(live, num_requests)
    assert live.ghost_text == ghost[2:]
    live.page.keyboard.type(ghost[2:3])
    live.wait_for_num_requests(num_requests + 1)
    live.press("Tab")
    assert live.value == f"{SURE} {ghost} "


def test_a_word_that_is_corrected_at_its_end_requests_predictions_again(
    live: Editor, input_method: InputMethod
) -> None:
    input_method.compose_each(("t", "te", "teh"))
    num_requests = len(live.requests)
    input_method.commit("the")
    live.wait_for_num_requests(num_requests + 1)
    assert live.requests[-1]["context"] == f"{SURE} the"


def test_letters_deleted_from_a_composed_word_request_nothing(live: Editor, input_method: InputMethod) -> None:
    input_method.compose_each(("t", "th", "the"))
    num_requests = len(live.requests)
    for text in ("th", "t", ""):
        input_method.compose(text)
    assert_no_request(live, num_requests)
    assert live.ghost_text == ""
    input_method.compose_each("s")


def test_nothing_is_suggested_while_letters_are_converted(live: Editor, input_method: InputMethod) -> None:
    num_requests = len(live.requests)
    for text in ("ｎ", "に"):  # wide Latin letters before the first kana
        input_method.compose(text)
        assert live.ghost_text == ""
    assert_no_request(live, num_requests)
    input_method.commit("二")
    live.wait_for_num_requests(num_requests + 1)
    assert live.requests[-1]["context"] == f"{SURE} 二"


def test_nothing_is_suggested_while_a_keyboard_composes_latin_letters(live: Editor, input_method: InputMethod) -> None:
    """Chinese in Pinyin is Latin letters until it is converted."""
    num_requests = len(live.requests)
    for text in ("n", "ni", "ni h"):
        input_method.press("Process", "KeyN")
        input_method.compose(text)
    assert_no_request(live, num_requests)
    assert live.ghost_text == ""
    input_method.commit("你好")
    live.wait_for_num_requests(num_requests + 1)


def test_a_touch_keyboards_keys_have_no_place_and_its_words_are_followed(
    live: Editor, input_method: InputMethod
) -> None:
    for text in ("t", "th"):
        input_method.press("Unidentified", "")
        input_method.compose_each([text])


def test_letters_that_were_converted_once_are_converted_again(live: Editor, input_method: InputMethod) -> None:
    """A touch keyboard for Pinyin is recognised after its first word, and one for Latin text likewise."""
    input_method.compose_each(["ni"])
    input_method.commit("你")
    live.page.keyboard.type(" ")
    live.wait_for_num_requests(len(live.requests))
    live.page.wait_for_timeout(QUIET_MS)
    num_requests = len(live.requests)
    input_method.compose("h")
    input_method.compose("hao")
    assert_no_request(live, num_requests)
    input_method.commit("hao")
    live.wait_for_num_requests(num_requests + 1)
    live.page.keyboard.type(" ")
    live.wait_for_num_requests(num_requests + 2)
    input_method.compose_each("th")


# ---- keys ----


def test_the_character_of_a_chord_stands_in_the_text(editor: Editor) -> None:
    editor.request_suggestions()
    session = editor.page.context.new_cdp_session(editor.page)
    event = {"key": "#", "code": "Digit3", "windowsVirtualKeyCode": 51, "modifiers": 1}  # British, on a Mac
    session.send("Input.dispatchKeyEvent", {"type": "keyDown", "text": "#", **event})
    session.send("Input.dispatchKeyEvent", {"type": "keyUp", **event})
    assert editor.value == f"{OPENING}#"


# ---- right to left ----


# Of a line, the text before the ghost text.
TEXT_BOX = """line => {
    const range = document.createRange();
    range.selectNodeContents(line);
    range.setEndBefore(line.querySelector(".tercet-ghost"));
    return range.getBoundingClientRect().toJSON();
}"""


# A text, what is suggested after it, and the directions of the paragraphs.
PARAGRAPHS = [
    ("שלום עולם", " טוב", ["rtl"]),
    ("مرحبا", " بالعالم", ["rtl"]),
    ("“שלום", " עולם", ["rtl"]),
    ("The sea\nשלום", " עולם", ["ltr", "rtl"]),
    ("שלום\nThe sea", " and sky", ["rtl", "ltr"]),
    ("The sea", " and sky", ["ltr"]),
]


def test_each_paragraph_runs_as_its_first_letter_does_and_ghost_text_with_it(editor: Editor) -> None:
    """The responses are stand-ins, because the model knows no such text."""
    direction = "(element) => getComputedStyle(element).direction"
    lines = editor.page.locator("#text .cm-line")
    for text, ghost, directions in PARAGRAPHS:
        answer_with(editor.page, ghost)
        editor.press("Control+a", "Delete")
        editor.type(text)
        editor.press("Alt+Enter")
        expect(editor.ghost).to_have_text(ghost)
        assert [line.evaluate(direction) for line in lines.all()] == directions
        line, ghost_box = lines.last.bounding_box(), editor.ghost.bounding_box()
        before = lines.last.evaluate(TEXT_BOX)
        assert line
        assert ghost_box
        middle = line["x"] + line["width"] / 2
        if directions[-1] == "rtl":  # from the right edge, and the ghost text at its left
            assert before["x"] > middle
            assert ghost_box["x"] + ghost_box["width"] <= before["x"] + 1
        else:
            assert before["x"] + before["width"] < middle
            assert ghost_box["x"] >= before["x"] + before["width"] - 1
        editor.page.wait_for_timeout(MIN_VISIBLE_MS)
        editor.press("Tab")
        assert editor.value.rstrip(" ") == f"{text}{ghost}"
