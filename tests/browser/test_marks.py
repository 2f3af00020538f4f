"""Marks around a word: what takes the place of the space that comes with it, suggestions before closing marks,
lists, and emphasis."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.driver import MIN_VISIBLE_MS, Editor
from tests.browser.test_editors import EditorPage, bundles, each_editor, open_editor
from tests.e2e.harness import until

__all__ = ["bundles", "open_editor"]  # fixtures

# What is before the accepted word, and the marks that are typed after it.
REPLACING = {
    "The": "'’-–—.,;:!?…)]}>»›”%‰°/\n",
    'He said, "the': '"',
    "„Der ‚kleine": "“‘",
    "Er sagte: »der": "«",
    "”Den": "”",
    "**The *very _old ~good =new `x": "*_~=`",
    "Let $x + y": "$",
}
OPENING_MARKS = {
    "The": '"“„‘‚«([{*_~=`$@&¿',
    '"No," he said, and the': '"',
    '"A line that ends\nThe': '"',
    "* an item, 2 * 3 * 4 of the": "*",
    "”Nej”, sa den": "”",
    "»Nein«, sagte der": "»",
    "It costs $5 and the": "$",
}


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


def accept_after(editor: Editor, before: str) -> None:
    """Replace the text, and accept " secretary " after it."""
    editor.press("Control+a", "Delete")
    editor.page.keyboard.insert_text(before)
    editor.press("Alt+Enter")
    expect(editor.options.first).to_be_visible()
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    editor.press("Tab")
    assert editor.value == f"{before} secretary "


def test_marks_that_follow_a_word_replace_its_space(editor: Editor) -> None:
    answer_with(editor.page, " secretary")
    for marks, space in ((REPLACING, ""), (OPENING_MARKS, " ")):
        for before, mark in ((before, mark) for before, each in marks.items() for mark in each):
            accept_after(editor, before)
            editor.page.keyboard.type(mark)
            assert editor.value == f"{before} secretary{space}{mark}"


def test_a_typed_space_is_the_writers_and_sets_a_dash_apart(editor: Editor) -> None:
    answer_with(editor.page, " secretary")
    for typed, expected in ((" !", " !"), ("'s", "'s"), ("– a", " – a"), ("–a", "–a"), ("\u00a0:", "\u00a0:")):
        accept_after(editor, "The")
        editor.page.keyboard.type(typed)
        assert editor.value == f"The secretary{expected}"


def test_a_mark_replaces_an_accepted_comma(editor: Editor) -> None:
    for comma, mark, after in [(",", ".", ""), (",", "!", ")"), (",", "?", '"'), ("،", "؟", ""), ("，", "。", "")]:
        answer_with(editor.page, f" water{comma}")
        editor.press("Control+a", "Delete")
        editor.page.keyboard.insert_text(f'("The{after}')
        editor.press(*["ArrowLeft"] * len(after), "Alt+Enter")
        expect(editor.options.first).to_be_visible()
        editor.page.wait_for_timeout(MIN_VISIBLE_MS)
        editor.press("Tab")
        accepted = editor.value
        editor.page.keyboard.type(f"{mark} So")
        assert editor.value == f'("The water{mark} So{after}'
        editor.press("Control+z")
        assert editor.value == accepted


@each_editor
@pytest.mark.parametrize(("typed", "expected"), [(".", "."), (";", ";"), (", ", ", "), (",;", ";"), (")", ",)")])
def test_marks_after_an_accepted_comma(
    open_editor: Callable[..., EditorPage], name: str, typed: str, expected: str
) -> None:
    editor = open_editor(name, mode="live")
    answer_with(editor.page, " water, and more")
    editor.type("The")
    editor.wait_for_unasked()
    editor.press("Alt+ArrowRight")
    editor.page.keyboard.type(typed)
    assert editor.value == f"The water{expected}"
    if len(typed) == 1:
        editor.press("Control+z")
        assert editor.value == "The water, "


@pytest.mark.parametrize("after", ['"', ")", "**", ".", "”)", "'.", "_", "]]", "$"])
def test_suggestions_before_closing_marks(open_page: Callable[..., Editor], after: str) -> None:
    editor = open_page(mode="eager")
    editor.type(f"He looked at her and said that he did{after}")
    editor.press(*["ArrowLeft"] * len(after))
    editor.type(" not")
    until(lambda: editor.ghost_text, 10, "ghost text")
    if after == '"':  # before the others, the model may know only one word
        expect(editor.list).to_be_visible()
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    editor.press("Tab")
    accepted = editor.value.removesuffix(after)
    assert accepted.startswith("He looked at her and said that he did not")
    assert len(accepted) > len("He looked at her and said that he did not")
    assert accepted == accepted.rstrip()
    assert editor.value.endswith(after)


@each_editor
def test_words_before_a_bracket_that_the_editor_closed(open_editor: Callable[..., EditorPage], name: str) -> None:
    editor = open_editor(name, mode="live")
    answer_with(editor.page, " fond of it")
    editor.type("The old man (who was ver")
    if name != "codemirror":  # it closes brackets by itself
        editor.page.keyboard.type(")")
        editor.press("ArrowLeft")
    editor.page.keyboard.type("y")
    editor.wait_for_unasked()
    editor.press("Alt+ArrowRight")
    assert editor.value == "The old man (who was very fond)"
    editor.press("Tab")
    assert editor.value == "The old man (who was very fond of it)"
    editor.page.keyboard.type(")")
    assert editor.value.removesuffix(")") == "The old man (who was very fond of it" + ")" * (name != "codemirror")


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
