"""Which keys take how much of a suggestion, and keys that a writer chooses in the page."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.driver import Editor, answer_with
from tests.browser.editor_pages import OpenEditor
from tests.browser.test_live import hold, type_until_shown

SUGGESTION = ' to Mr. Lowe, whom she saw "again!" and again. Then'


def test_the_options_say_what_keys_take_and_the_rest_stays(open_each: OpenEditor) -> None:
    editor = open_each(mode="live", tab="word", keys=json.dumps({"acceptClause": ["F4"]}))
    editor.type_before("I wrote", SUGGESTION)
    for key, taken in (("Tab", " to "), ("F4", " to Mr. Lowe, ")):
        editor.press(key)
        assert editor.value == f"I wrote{taken}"
        if not editor.is_textarea:
            expect(editor.ghost).to_have_text(SUGGESTION.removeprefix(taken))
    editor.press("Control+z")
    assert editor.value != f"I wrote{taken}"


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
