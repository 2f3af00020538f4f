"""The editor page in Firefox: what depends on the browser's keys, undo stack and colors.

The fixtures are those of the other tests, with Firefox in place of Chromium.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.driver import OPENING, Editor, open_editor
from tests.e2e.harness import Tercet


@pytest.fixture(scope="session")
def browser(firefox: Browser) -> Browser:
    return firefox


def test_typing_enters_the_text(editor: Editor) -> None:
    text = "Two lines,\nand “quotes” — é, 東, 🌊."
    editor.type(text)
    assert editor.value == text
    assert editor.requests == []


def test_tab_requests_three_suggestions_and_escape_dismisses_them(editor: Editor) -> None:
    assert len(editor.request_suggestions()) == 3
    editor.press("Escape")
    expect(editor.list).to_be_hidden()
    assert (editor.value, editor.ghost_text) == (OPENING, "")
    assert len(editor.requests) == 1


def test_undo_removes_exactly_the_accepted_text(editor: Editor) -> None:
    editor.request_suggestions()
    accepted = editor.ghost_text
    assert accepted
    editor.press("Enter")
    assert editor.value == OPENING + accepted
    editor.type("!")
    assert editor.value == OPENING + accepted + "!"
    editor.press("Control+z")
    assert editor.value == OPENING + accepted
    editor.press("Control+z")
    assert editor.value == OPENING
    editor.press("Control+Shift+z")
    assert editor.value == OPENING + accepted


def test_escape_then_tab_leaves_the_text(editor: Editor) -> None:
    editor.type(OPENING)
    expect(editor.text).to_be_focused()
    editor.press("Escape", "Tab")
    expect(editor.text).not_to_be_focused()
    assert editor.requests == []


def test_a_held_key_repeats_and_a_selection_is_replaced(editor: Editor) -> None:
    editor.type("Once")
    for _ in range(3):
        editor.page.keyboard.down("x")
    editor.page.keyboard.up("x")
    assert editor.value == "Oncexxx"
    editor.press("Shift+ArrowLeft", "Shift+ArrowLeft", "y")
    assert editor.value == "Oncexy"


@pytest.mark.xfail(strict=True, reason="the mirror's backplate covers the text")
def test_forced_colors_show_the_text(launch_firefox: Callable[..., Browser], tercet: Tercet) -> None:
    with launch_firefox(**{"browser.display.document_color_use": 2}) as firefox:
        editor = open_editor(firefox, tercet, {"pauses": False}, {})
        assert editor.page.evaluate("matchMedia('(forced-colors: active)').matches")
        pictures = set()
        for text in ("WWWWWWWW", "iiiiiiii"):
            editor.press("Control+a")
            editor.type(text)
            editor.press("Escape", "Tab")  # away from the text, so that no caret is drawn
            expect(editor.text).not_to_be_focused()
            pictures.add(editor.text.screenshot())
            editor.text.focus()
        assert editor.errors == []
        assert len(pictures) == 2
