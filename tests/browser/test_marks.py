"""Marks around a word: suggestions before closing marks, lists, and emphasis."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.driver import MIN_VISIBLE_MS, Editor, answer_with
from tests.browser.editor_pages import OpenEditor


def test_words_before_a_bracket_that_the_editor_closed(open_each: OpenEditor) -> None:
    editor = open_each(" fond of it", mode="live")
    editor.type("The old man (who was ver")
    if editor.name != "codemirror":  # it closes brackets by itself
        editor.page.keyboard.type(")")
        editor.press("ArrowLeft")
    editor.page.keyboard.type("y")
    editor.wait_for_unasked()
    editor.press("Alt+ArrowRight")
    assert editor.value == "The old man (who was very fond)"
    editor.press("Tab")
    assert editor.value == "The old man (who was very fond of it)"
    editor.page.keyboard.type(")")
    assert editor.value.removesuffix(")") == "The old man (who was very fond of it" + ")" * (
        editor.name != "codemirror"
    )


# Before and after a key: `|` is the caret, `«` and `»` enclose the selection, `¶` breaks lines.
CONTINUED = """
- milk| → - milk¶- |; * milk| → * milk¶* |; + milk| → + milk¶+ |; 9. milk| → 9. milk¶10. |; 1) milk| → 1) milk¶2) |
> said| → > said¶> |; > - said| → > - said¶> - |; - [x] done| → - [x] done¶- [ ] |; 1. one| two → 1. one¶2. |two
- a¶- | → - a¶|; - a¶  - | → - a¶- |; 1. a¶2. | → 1. a¶|; > a¶> | → > a¶|; > > a¶> > | → > > a¶> |; > - | → > |
- [ ] | → |; |- a → ¶|- a; * * *| → * * *¶|; ```¶- a| → ```¶- a¶|; -a| → -a¶|; plain| → plain¶|
"""
BOLD = """
a wo|rd → a **wo|rd**; a **wo|rd** b → a wo|rd b; a __wo|rd__ b → a wo|rd b; **one t|wo** → one t|wo
don’t| → **don’t|**; on |, → on **|**,; on **|**, → on |,; *a|* → ***a|***
a «word »b → a **«word»** b; a «**word**» → a «word»; **a «b** c» → **a «b c»**
«- one¶- two¶¶> # three» → - **«one**¶- **two**¶¶> # **three»**
"""
ITALIC = BOLD.replace("**", "~").replace("*", "**").replace("~", "*").replace("__", "_")


@pytest.mark.parametrize(("key", "cases"), [("Enter", CONTINUED), ("Control+b", BOLD), ("Control+i", ITALIC)])
def test_keys_of_markdown(editor: Editor, key: str, cases: str) -> None:
    for case in re.split(r"; |\n", cases.strip("\n")):
        before, after = (each.replace("¶", "\n") for each in case.split(" → "))
        start, *ends = (match.start() - number for number, match in enumerate(re.finditer("[|«»]", before)))
        editor.press("Control+a", "Delete")
        editor.page.keyboard.insert_text(re.sub("[|«»]", "", before))
        editor.press(
            "Control+Home", *["ArrowRight"] * start, *["Shift+ArrowRight"] * sum(end - start for end in ends), key
        )
        (start, end), text = editor.selection, editor.value
        selected = f"«{text[start:end]}»" if end > start else "|"
        assert text[:start] + selected + text[end:] == after, case


def test_enter_accepts_what_was_asked_for_and_continues_the_list_after_it(editor: Editor) -> None:
    answer_with(editor.page, "milk")
    for typed in ("- ", ""):
        editor.type(typed)
        editor.press("Alt+Enter")
        expect(editor.options.first).to_be_visible()
        editor.page.wait_for_timeout(MIN_VISIBLE_MS)
        editor.press("Enter", "Enter")  # the list's, and the text's
    assert editor.value == "- milk\n- milk\n- "
