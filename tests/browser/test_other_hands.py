"""Suggestions beside others: a text that a program changes, and another list that the editor shows."""

from __future__ import annotations

import re
from itertools import product

import pytest
from playwright.sync_api import expect

from tests.browser.driver import OPENING
from tests.browser.editor_pages import READING_MS, OpenEditor

# What a page does with a textarea, without an event that the adapter could listen to.
LONGER = 'textarea.value += " more"'
CHANGES = [
    'textarea.value = ""',
    'textarea.value = "Another text of a draft"',
    "textarea.value = textarea.value + 'x'; textarea.setSelectionRange(33, 33)",
    "textarea.readOnly = true",
]
FIELD = "document.querySelector('textarea')"
VALUE = "window.value = textarea.value"
CLICK = "document.querySelector('li')?.dispatchEvent(new MouseEvent('mousedown', { bubbles: true, cancelable: true }))"
# Empty: a click.
KEYS = ["", "Tab", "Enter", "Alt+ArrowRight", "Alt+1", "ArrowDown", "Escape"]
MENTIONS = """(field) => {
  let isChosen = false;
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") isChosen = true;
    else if (!isChosen || !["ArrowUp", "Tab", "Enter", "Escape"].includes(event.key)) return;
    window.taken = event.key;
    event.preventDefault();
  });
}"""


def test_a_textarea_that_a_program_changes_is_left_alone(open_editor: OpenEditor) -> None:
    """Each change, and each key after one of them. For other editors: tests/browser/test_editors.py."""
    editor = open_editor("textarea", " secretary of the old man")
    for change, key in [*product(CHANGES, ("", "Tab")), *product([LONGER], KEYS)]:
        editor.page.evaluate(f"{FIELD}.value = ''")
        editor.request(num_listed=1)
        click = "" if key else CLICK  # at once: Chromium tells of some changes a little later
        editor.page.evaluate(f"(() => {{ const textarea = {FIELD}; {change}; {VALUE}; {click} }})()")
        value = editor.page.evaluate("window.value")
        if key:
            editor.press(key)
        assert re.sub(r"\s", "", editor.value) == re.sub(r"\s", "", value)  # Enter is a line break of the writer's
        expect(editor.items).to_have_count(0)
        editor.text.evaluate("(element) => { element.readOnly = false }")


@pytest.mark.parametrize("name", ["textarea", "prosemirror"])
def test_keys_are_of_the_list_in_which_a_choice_was_made(open_editor: OpenEditor, name: str) -> None:
    editor = open_editor(name, mode="live")
    editor.type_before(OPENING, " secretary of the old man")
    if name == "textarea":
        editor.text.evaluate(MENTIONS)
    else:
        editor.press("F6")  # opens a plugin's list
    for key in ("ArrowUp", "Tab", "Enter", "Escape"):
        editor.press("ArrowDown", key)
        assert editor.page.evaluate("window.taken") == key
        assert editor.value == OPENING
    editor.press("Alt+1")
    assert editor.value.rstrip() == f"{OPENING} secretary of the old man"


def test_keys_are_of_a_list_that_aria_announces(open_editor: OpenEditor) -> None:
    editor = open_editor("textarea", mode="live")
    editor.type_before(OPENING, " secretary of the old man")
    editor.text.evaluate("(field) => { field.ariaExpanded = 'true' }")
    editor.text.evaluate("(field) => field.setAttribute('aria-activedescendant', 'mention-1')")
    editor.text.evaluate("(field) => field.addEventListener('keydown', (event) => event.preventDefault())")
    editor.press("Tab", "Enter", "Escape")
    assert editor.value == OPENING
    editor.text.evaluate("(field) => { field.ariaExpanded = 'false' }")
    editor.press("Tab")
    assert editor.value.rstrip() == f"{OPENING} secretary of the old man"


def test_tab_accepts_the_completion_that_was_chosen_in_codemirror(open_editor: OpenEditor) -> None:
    editor = open_editor("codemirror", "three", mode="live")
    for keys, expected in ((["Tab"], "zzthree "), (["ArrowDown", "Tab"], "zztwo"), (["ArrowDown", "Enter"], "zztwo")):
        editor.press("Control+a", "Delete")
        editor.type("zz")
        editor.wait_for_unasked()
        expect(editor.page.locator(".cm-tooltip-autocomplete")).to_be_visible()
        editor.page.wait_for_timeout(READING_MS)
        editor.press(*keys)
        assert editor.value == expected
