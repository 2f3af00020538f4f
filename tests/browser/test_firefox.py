"""The editor page in Firefox: what depends on the browser's keys, undo stack and colors.

The fixtures are those of the other tests, with Firefox in place of Chromium.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.driver import OPENING, SURE, Editor, open_editor
from tests.browser.test_editor import (  # noqa: F401  # the same, in Firefox
    test_escape_dismisses_and_later_keys_edit_the_text,
    test_undo_removes_exactly_the_accepted_suggestion,
)
from tests.browser.test_live import (  # noqa: F401  # the same, in Firefox
    assert_the_text_is_visible,
    hold,
    live,
    test_the_list_waits_until_the_first_suggestion_stands_still,
    test_unasked_suggestions_leave_the_plain_keys_to_the_writer,
    type_until_shown,
)
from tests.e2e.harness import Tercet


@pytest.fixture(scope="session")
def browser(firefox: Browser) -> Browser:
    return firefox


def test_a_held_tab_takes_one_suggestion(live: Editor) -> None:  # noqa: F811  # the fixture
    ghost = type_until_shown(live)
    hold(live.page, "Tab", 40)
    assert live.value == f"{SURE}{ghost} "


def test_escape_then_tab_leaves_the_text(editor: Editor) -> None:
    editor.type(OPENING)
    expect(editor.text).to_be_focused()
    editor.press("Escape", "Tab")
    expect(editor.text).not_to_be_focused()
    assert editor.requests == []


def test_forced_colors_show_the_text(launch_firefox: Callable[..., Browser], tercet: Tercet) -> None:
    with launch_firefox(**{"browser.display.document_color_use": 2}) as firefox:
        editor = open_editor(firefox, tercet)
        assert editor.page.evaluate("matchMedia('(forced-colors: active)').matches")
        assert_the_text_is_visible(editor)
        assert editor.errors == []
