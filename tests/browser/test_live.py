"""Suggestions at every key: what is shown while a writer types, which keys are theirs, and what never happens."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.driver import MIN_VISIBLE_MS, OPENING, PHONE, SURE, Editor, violations
from tests.e2e.harness import PATIENCE_S, until

OpenPage = Callable[..., Editor]


@pytest.fixture
def live(open_page: OpenPage) -> Editor:
    return open_page(mode="eager")


def type_until_shown(editor: Editor, text: str = SURE) -> str:
    """Type a text and wait until ghost text can be accepted."""
    editor.type(text)
    until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    return editor.ghost_text


def hold(page: Page, key: str, num_repeats: int) -> None:
    """Press a key and hold it: the browser repeats it."""
    for _ in range(1 + num_repeats):
        page.keyboard.down(key)
        page.wait_for_timeout(30)
    page.keyboard.up(key)


# ---- what is shown ----


def test_the_list_waits_until_the_first_suggestion_stands_still(live: Editor) -> None:
    live.type(OPENING)
    until(lambda: live.ghost_text, PATIENCE_S, "ghost text")
    expect(live.list).to_be_hidden()
    expect(live.list).to_be_visible()
    assert len(live.suggestions) >= 2
    expect(live.announcements).to_have_text("")
    assert live.text.get_attribute("aria-activedescendant") is None
    live.press("Alt+ArrowDown")
    assert live.text.get_attribute("aria-activedescendant") is not None


# ---- taking ----


def test_a_misspelled_word_is_corrected_from_the_list(live: Editor) -> None:
    live.type("He did not recieve")
    expect(live.options).to_have_text([re.compile("correct to: receive$")])
    assert live.ghost_text == ""
    live.page.wait_for_timeout(MIN_VISIBLE_MS)
    live.press("Alt+1")
    assert live.value == "He did not receive "
    live.press("Control+z")
    assert live.value == "He did not recieve"


# ---- leaving the writer alone ----


def test_unasked_suggestions_leave_the_plain_keys_to_the_writer(live: Editor) -> None:
    type_until_shown(live, "one\ntwo\nthree and then the")
    expect(live.list).to_be_visible()
    live.press("ArrowUp")
    assert live.caret < len("one\ntwo\n")
    live.press("Control+End")
    type_until_shown(live, " old")
    live.press("Home")
    assert live.caret == len("one\ntwo\n")
    live.press("Control+End")
    type_until_shown(live, " man")
    live.press("Enter")
    assert live.value.endswith(" man\n")


def test_asked_inside_a_word_only_what_fits_is_inserted(live: Editor) -> None:
    live.type("She was very beautiful. It was a wondful day")
    live.press(*["ArrowLeft"] * len("ful day"))
    live.press("Alt+Enter")
    expect(live.page.locator("#latency")).to_contain_text("ms")
    live.page.wait_for_timeout(MIN_VISIBLE_MS)
    assert live.suggestions
    for row in live.suggestions:
        assert re.fullmatch(r"Alt \d\s*wond\w*", row), row
    live.press("Enter")
    assert re.fullmatch(r"She was very beautiful. It was a wond\w*ful day", live.value)


# ---- phones, zoom, contrast ----


@pytest.mark.parametrize(
    "context",
    [
        {"viewport": {"width": 550, "height": 380}, "device_scale_factor": 2},  # 200 % of 1100 × 760
        {"forced_colors": "active"},
        {**PHONE, "viewport": {"width": 360, "height": 380}},  # with its keyboard
    ],
    ids=["zoom", "forced colors", "phone"],
)
def test_axe_finds_no_violation_while_a_writer_types(open_page: OpenPage, context: dict[str, object]) -> None:
    editor = open_page(mode="eager", context=context)
    editor.type("\n\nThe end.")
    editor.press("Control+Home")
    type_until_shown(editor)  # no list opens above other text, so nothing changes while axe looks
    found = violations(editor.page)
    editor.press("Control+a", "Delete")
    type_until_shown(editor, OPENING)
    expect(editor.list).to_be_visible()
    found += violations(editor.page)
    assert not found
    assert editor.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_text_is_visible_in_forced_colors(open_page: OpenPage) -> None:
    assert_the_text_is_visible(open_page(mode="off", context={"forced_colors": "active"}))


def assert_the_text_is_visible(editor: Editor) -> None:
    """Pictures of two texts differ."""
    pictures = set()
    for text in ("WWWWWWWW", "iiiiiiii"):
        editor.press("Control+a")
        editor.type(text)
        editor.press("Escape", "Tab")  # away from the text, so that no caret is drawn
        expect(editor.text).not_to_be_focused()
        pictures.add(editor.text.screenshot())
        editor.text.focus()
    assert len(pictures) == 2


def test_pasted_text_is_continued(live: Editor) -> None:
    live.type(SURE)
    live.press("Control+a", "Control+c", "Control+End")
    num_requests = len(live.requests)
    live.press("Control+v")
    assert live.value == SURE * 2
    live.wait_for_num_requests(num_requests + 1)
    until(lambda: live.ghost_text, PATIENCE_S, "ghost text")
