"""Where ghost text stands: inside the column, with the text below it moved; and what the list shows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser.driver import MIN_VISIBLE_MS, Editor, answer_with, box
from tests.browser.editor_pages import OpenEditor
from tests.e2e.harness import PATIENCE_S, until

OpenPage = Callable[..., Editor]
BEFORE = "We write because the kitchen tap in the flat has been dri"
GHOST = "pping since Monday, and nobody has come to look at it or answered any of our letters"
# The height of each letter, with a mark where a line begins within a word.
LINES = """(text) => {
  const walker = document.createTreeWalker(text, NodeFilter.SHOW_TEXT), range = document.createRange();
  let lines = "", last = { letter: " ", top: 0 };
  while (walker.nextNode()) for (const [at, letter] of Array.from(walker.currentNode.data).entries()) {
    range.setStart(walker.currentNode, at);
    range.setEnd(walker.currentNode, at + 1);
    const top = Math.round(range.getBoundingClientRect().top);
    if (/\\S/.test(letter)) lines += (/\\w/.test(last.letter) && top > last.top + 5 ? "TORN" : "") + letter + top;
    last = { letter, top };
  }
  return lines.replace("TORNT", "T");  // the second paragraph
}"""


def assert_still(page: Page, text: Locator) -> None:
    """Type the ghost text: no letter of it, and none of the text below, changes its line, and no word is torn."""
    before = text.evaluate(LINES)
    assert "TORN" not in before
    for letter in GHOST[:-1]:
        page.keyboard.type(letter)
        assert text.evaluate(LINES) == before


@pytest.mark.parametrize("width", [1100, 700, 360])
def test_ghost_text_wraps_in_the_column_and_moves_the_text_below(open_page: OpenPage, width: int) -> None:
    editor = open_page(mode="eager", context={"viewport": {"width": width, "height": 760}})
    editor.type("\nThe second paragraph.")
    editor.press("Control+Home")
    answer_with(editor.page, GHOST)
    editor.type(BEFORE)
    until(lambda: editor.ghost_text == GHOST, PATIENCE_S, "ghost text")
    ghost = box(editor.ghost)
    line, below = (box(editor.text.locator(".cm-line").nth(number)) for number in (0, 1))
    assert line["x"] < ghost["x"] < ghost["x"] + ghost["width"] < line["x"] + line["width"]
    assert ghost["y"] + ghost["height"] <= below["y"] + 1
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    assert_still(editor.page, editor.text)


def test_in_other_editors_no_letter_changes_its_line(open_drawing: OpenEditor) -> None:
    editor = open_drawing(GHOST, mode="live")
    editor.type(BEFORE)
    expect(editor.ghost).to_have_text(GHOST)
    assert_still(editor.page, editor.text)


def test_the_list_has_alternatives_to_the_ghost_text_only(open_page: OpenPage) -> None:
    editor = open_page(mode="eager")
    answer_with(editor.page, " White, who", " Smith, he")
    editor.type("He met Mr")
    until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")
    answer_with(editor.page, "White, who", "Smith, he")
    editor.type(" ")  # the answers to this key say the same
    expect(editor.list).to_be_visible()
    assert (editor.ghost_text, editor.suggestions) == ("White, who", ["Alt 2Smith, he"])
    editor.press("Alt+ArrowDown")  # to choose from all, with what is chosen marked
    assert (editor.ghost_text, editor.suggestions) == ("Smith, he", ["Alt 1White, who", "Alt 2Smith, he"])
    expect(editor.chosen).to_have_text("Alt 2Smith, he")


def test_the_lists_of_other_editors_have_alternatives_too(open_each: OpenEditor) -> None:
    editor = open_each(mode="live")
    editor.type_before("He wrote", " 3.", " a letter")
    answer_with(editor.page, "3.", "a letter")
    editor.page.keyboard.type(" ")
    expect(editor.items).to_have_text(["3.", "a letter"] if editor.name == "textarea" else ["a letter"])


def test_a_line_break_that_an_input_method_inserts_is_one(editor: Editor) -> None:
    answer_with(editor.page, " asked:\n\nWhat")
    editor.request_suggestions()
    editor.page.keyboard.type(" asked:")
    editor.page.keyboard.insert_text("\n")
    assert (editor.value.count("\n"), editor.ghost_text) == (1, "\nWhat")


def test_what_was_visible_for_less_than_200_ms_is_not_taken(editor: Editor) -> None:
    """A key in a hurry takes nothing that was not read. The page's clock is the test's."""
    answer_with(editor.page, " the sea")
    clock = editor.page.context.clock
    clock.install()
    editor.type("He saw")
    clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))
    editor.press("Alt+Enter", "Tab")  # before the answer, too
    until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")
    editor.press("Tab")
    expect(editor.text).to_be_focused()
    assert (editor.value, len(editor.requests)) == ("He saw", 1)
    clock.run_for(250)
    editor.press("Tab")
    assert editor.value.startswith("He saw the sea")


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
