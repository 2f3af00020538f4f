"""Which keys take how much of a suggestion, and keys that a writer chooses in the page."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.driver import Editor
from tests.browser.test_editors import EditorPage, bundles, each_editor, open_editor
from tests.browser.test_live import hold, type_until_shown
from tests.browser.test_marks import answer_with

__all__ = ["bundles", "open_editor"]  # fixtures

SUGGESTION = ' to Mr. Lowe, whom she saw "again!" and again. Then'
WORD, CLAUSE, SENTENCE = "to ", "to Mr. Lowe, ", 'to Mr. Lowe, whom she saw "again!" and again. '


# Keys, options of the editor, and what the keys take.
CHORDS: list[tuple[str, dict[str, str], str]] = [
    ("Alt+ArrowRight", {}, WORD),
    ("Control+ArrowRight", {}, WORD),
    ("Alt+End", {}, CLAUSE),
    ("Alt+PageDown", {}, SENTENCE),
    ("Tab", {"tab": "word"}, WORD),
    ("Tab Tab Alt+End", {"tab": "word"}, CLAUSE),
    ("F4 Alt+ArrowRight", {"keys": json.dumps({"acceptClause": ["F4"]})}, f"{CLAUSE}whom "),
    ("Alt+End Tab", {}, f"{SENTENCE}Then "),
]


@each_editor
@pytest.mark.parametrize(("keys", "options", "taken"), CHORDS)
def test_a_chord_takes_a_part_and_the_rest_stays(
    open_editor: Callable[..., EditorPage], name: str, keys: str, options: dict[str, str], taken: str
) -> None:
    editor = open_editor(name, mode="live", **options)
    answer_with(editor.page, SUGGESTION)
    editor.type("I wrote")
    editor.wait_for_unasked()
    editor.press(*keys.split())
    assert editor.value == f"I wrote {taken}"
    if not editor.is_textarea and "Then" not in taken:
        expect(editor.ghost).to_have_text(SUGGESTION.removeprefix(f" {taken}"))
    editor.press("Control+z")
    assert editor.value != f"I wrote {taken}"


def test_tab_takes_one_word_and_a_held_one_no_more(open_page: Callable[..., Editor]) -> None:
    editor = open_page(mode="normal", tab_takes="word")
    answer_with(editor.page, SUGGESTION)
    type_until_shown(editor, "I wrote")
    hold(editor.page, "Tab", 20)
    assert (editor.value, editor.ghost_text) == ("I wrote to ", SUGGESTION.removeprefix(" to "))
    editor.press("Control+Home", "Control+ArrowRight")  # while nothing is shown, the editor's
    assert (editor.value, editor.caret) == ("I wrote to ", len("I"))


def test_keys_can_be_chosen_and_stay_in_the_browser(open_page: Callable[..., Editor]) -> None:
    editor = open_page(mode="normal")
    page, table = editor.page, editor.page.locator("#shortcuts")
    answer_with(page, SUGGESTION)

    def choose(action: str, key: str) -> str:
        table.locator(f"[data-key={action}]").click()
        editor.press(key)
        return table.get_by_role("status").inner_text()

    page.get_by_role("button", name="Shortcuts").click()
    assert choose("acceptWord", "Tab") == "Tab is for “accept the suggestion” already. Press other keys, or Esc."
    for key in ("x", "Shift+ArrowRight", "Control+z", "Enter", "F5", "Control+Shift+ArrowRight", "Alt+ArrowLeft"):
        editor.press("Escape")
        assert "Press other keys" in choose("acceptWord", key)
    editor.press("Escape")
    expect(table.locator("[data-key=acceptWord]")).to_have_text("Alt →, Ctrl →")
    assert choose("acceptWord", "Control+Alt+j") == "Ctrl Alt J: accept the next word."
    assert choose("accept", "Alt+ArrowRight") == "Alt →: accept the suggestion."
    expect(page.locator("#accept-word kbd")).to_have_text("Ctrl Alt J")
    editor.reload()
    for key, expected in (("Tab", ""), ("Control+Alt+j", " to "), ("Alt+ArrowRight", f"{SUGGESTION} ")):
        editor.press("Control+a", "Delete")
        expect(page.locator(".cm-placeholder")).to_contain_text("Alt → takes them.")
        type_until_shown(editor, "I wrote")
        editor.press(key)
        assert editor.value == f"I wrote{expected}"
    page.get_by_role("button", name="Shortcuts").click()
    table.get_by_role("button", name="Reset keys").click()
    expect(table.locator("[data-key=accept]")).to_have_text("Tab")
