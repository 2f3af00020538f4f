"""Compositions and right-to-left text in the page's editor.

Which compositions request predictions: tests/deploy/clients/npm/test_keys.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.driver import MIN_VISIBLE_MS, SURE, Editor, InputMethod, answer_with, box
from tests.e2e.harness import PATIENCE_S, until

QUIET_MS = 400  # longer than the page takes to send a request for a change


@pytest.fixture
def live(open_page: Callable[..., Editor]) -> Editor:
    editor = open_page(mode="eager")
    editor.type(f"{SURE} ")
    until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")
    return editor


def test_ghost_text_grows_with_a_composed_word_and_stays_at_its_end(live: Editor) -> None:
    input_method = InputMethod(live.page)
    ghost = live.ghost_text
    for end in (1, 2):
        num_requests = len(live.requests)
        input_method.compose(ghost[:end])
        live.wait_for_num_requests(num_requests + 1)
    assert live.ghost_text == ghost[2:]
    num_requests = len(live.requests)
    input_method.commit(ghost[:2])
    live.page.wait_for_timeout(QUIET_MS)
    assert len(live.requests) == num_requests
    assert live.ghost_text == ghost[2:]
    live.page.keyboard.type(ghost[2:3])
    live.wait_for_num_requests(num_requests + 1)
    live.press("Tab")
    assert live.value == f"{SURE} {ghost} "


def test_nothing_is_suggested_while_a_keyboard_composes_latin_letters(live: Editor) -> None:
    """Chinese in Pinyin is Latin letters until it is converted."""
    input_method = InputMethod(live.page)
    num_requests = len(live.requests)
    for text in ("n", "ni", "ni h"):
        input_method.press("Process", "KeyN")
        input_method.compose(text)
    live.page.wait_for_timeout(QUIET_MS)
    assert (len(live.requests), live.ghost_text) == (num_requests, "")
    input_method.commit("你好")
    live.wait_for_num_requests(num_requests + 1)


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
        line, ghost_box = box(lines.last), box(editor.ghost)
        before = lines.last.evaluate(TEXT_BOX)
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
