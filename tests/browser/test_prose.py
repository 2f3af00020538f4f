"""Nothing unasked in code, front matter and mathematics, in the page and in the packaged adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.driver import SURE, Editor
from tests.browser.editor_pages import QUIET_MS, OpenEditor
from tests.browser.test_live import type_until_shown

CODE = "```\nThe old man looked at"


def test_code_has_suggestions_only_when_asked_or_switched_on(open_page: Callable[..., Editor]) -> None:
    """The fence begins before the part of the text that a request has."""
    editor = open_page(mode="eager", prose=True)
    editor.text.focus()
    editor.page.keyboard.insert_text("```\n" + "The old man looked at the sea and\n" * 500)
    num_requests = len(editor.requests)
    editor.type(SURE)
    editor.page.wait_for_timeout(QUIET_MS)
    assert (editor.ghost_text, len(editor.requests)) == ("", num_requests)
    editor.press("Alt+Enter")
    editor.wait_for_response()
    editor.press("Escape", "Control+End", "Enter")
    type_until_shown(editor, "```\n\nThe old man looked at the")
    editor = open_page(mode="eager", prose=False)
    type_until_shown(editor, CODE)
    assert "prose" not in editor.requests[-1]


@pytest.mark.parametrize("name", ["textarea", "codemirror"])
def test_the_adapters_know_code(open_editor: OpenEditor, name: str) -> None:
    editor = open_editor(name, mode="live")
    editor.type(CODE)
    editor.page.wait_for_timeout(QUIET_MS)
    assert not [body for body in editor.requests if "\n" in body["context"]]
    editor.press("Enter")
    editor.page.keyboard.type("```\nThe old man looked at the")
    editor.wait_for_unasked()


def test_prosemirror_has_code_blocks(open_editor: OpenEditor) -> None:
    editor = open_editor("prosemirror", mode="live")
    editor.text.click()
    editor.press("F5")  # makes the paragraph a block of code
    editor.page.keyboard.type("The old man looked at the")
    editor.page.wait_for_timeout(QUIET_MS)
    assert not editor.requests
    editor.press("Alt+Enter")
    expect(editor.items).to_have_count(3)
