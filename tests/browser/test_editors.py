"""The packed npm package in a textarea, CodeMirror and ProseMirror, bundled into pages of another origin."""

from __future__ import annotations

import re

from playwright.sync_api import expect

from tests.browser.driver import OPENING, InputMethod, box
from tests.browser.editor_pages import QUIET_MS, READING_MS, OpenEditor

# But for the first test, these answer: what the adapters do with an answer does not depend on its text.
THREE = (" went on with his tale", " said nothing of it", " turned to the door")


def test_request_choose_accept_and_undo(open_each: OpenEditor) -> None:
    editor = open_each()
    suggestions = editor.request()
    editor.press("ArrowDown")
    expect(editor.items.nth(1)).to_have_attribute("aria-current", "true")
    if not editor.is_textarea:
        assert (editor.ghost.text_content() or "").strip() == suggestions[1]
        expect(editor.announcements).to_have_text(f"Suggestion 2 of 3: {suggestions[1]}")
    editor.press("ArrowRight")
    with_word = editor.value
    word = with_word.removeprefix(OPENING).strip()
    assert suggestions[1].startswith(word)
    assert len(suggestions[1]) > len(word) > 0
    editor.press("Tab")
    accepted = editor.value
    assert accepted.removeprefix(OPENING).strip() == suggestions[1]
    expect(editor.items).to_have_count(0)
    editor.page.keyboard.type("Then")
    assert editor.value == f"{accepted}Then"
    for value in (accepted, with_word, OPENING):
        editor.press("Control+z")
        assert editor.value == value
    editor.press("Control+y")
    assert editor.value == with_word
    assert len(editor.requests) == 1


def test_the_list_shows_whole_words(open_each: OpenEditor) -> None:
    editor = open_each()
    words = editor.request("The old man looked at the se")
    assert all(word.startswith("se") for word in words)
    editor.press("ArrowDown")
    if not editor.is_textarea:
        expect(editor.announcements).to_have_text(f"Suggestion 2 of 3: {words[1]}")
    editor.press("Enter")
    assert editor.value.strip() == f"The old man looked at the {words[1]}"


def test_the_list_follows_the_color_scheme(open_each: OpenEditor) -> None:
    """CodeMirror gives its tooltips a light background, on which light text could not be read."""
    editor = open_each(*THREE)
    editor.page.evaluate("document.documentElement.style.colorScheme = 'dark'")
    editor.request()
    background, text = editor.items.first.evaluate(
        """(item) => {
          const list = item.closest(".tercet-list");
          return [getComputedStyle(list).backgroundColor, getComputedStyle(item).color];
        }"""
    )
    assert (background, text) == ("rgb(36, 34, 32)", "rgb(232, 227, 216)")


def test_suggestions_while_typing_and_none_after_undo_and_deletion(open_each: OpenEditor) -> None:
    editor = open_each(mode="live")
    editor.type_before(OPENING, *THREE)
    if not editor.is_textarea:
        assert editor.announcements.text_content() == ""  # a screen reader would interrupt the typing
    editor.press("Tab")
    accepted = editor.value
    assert accepted.startswith(OPENING)
    assert accepted != OPENING
    assert editor.requests[-1]["context"].startswith(OPENING)
    editor.page.wait_for_timeout(QUIET_MS)
    num_requests = len(editor.requests)
    for keys, value in (("Control+z", OPENING), ("Control+y", accepted), ("Control+z", OPENING)):
        editor.press(keys)
        assert editor.value == value
    editor.press("Backspace")
    assert editor.value == OPENING[:-1]
    editor.page.wait_for_timeout(QUIET_MS)
    assert len(editor.requests) == num_requests
    expect(editor.ghost).to_have_count(0)
    expect(editor.items).to_have_count(0)
    editor.page.keyboard.type("d")
    editor.wait_for_unasked()
    assert len(editor.requests) == num_requests + 1


def test_a_composition_is_left_alone_until_it_ends(open_each: OpenEditor) -> None:
    editor = open_each(mode="live")
    editor.type_before(OPENING, *THREE)
    num_requests = len(editor.requests)
    input_method = InputMethod(editor.page)
    for text in ("に", "にほ", "にほん"):
        input_method.compose(text)
    assert editor.value == f"{OPENING}にほん"
    expect(editor.ghost).to_have_count(0)
    editor.page.wait_for_timeout(QUIET_MS)
    assert len(editor.requests) == num_requests
    input_method.commit("日本")
    editor.wait_for_num_requests(num_requests + 1)
    assert editor.value == f"{OPENING}日本"
    assert editor.requests[-1]["context"] == f"{OPENING}日本"
    editor.page.wait_for_timeout(QUIET_MS)
    num_requests = len(editor.requests)
    input_method.compose("の")
    input_method.commit("の")  # ends without another change
    editor.wait_for_num_requests(num_requests + 1)
    assert editor.value == f"{OPENING}日本の"
    assert editor.requests[-1]["context"] == f"{OPENING}日本の"


def test_a_composed_word_that_will_stand_is_followed_and_accepted(open_each: OpenEditor) -> None:
    """As on a touch screen, where a suggestion is tapped and every word is composed."""
    editor = open_each(mode="live")
    editor.type_before(f"{OPENING} ", "et and dark", "te a number")
    input_method = InputMethod(editor.page)
    for text in ("q", "qu", "qui"):  # no idea begins with these: it would be followed without requests
        num_requests = len(editor.requests)
        input_method.compose(text)
        editor.wait_for_num_requests(num_requests + 1)
        assert editor.requests[-1]["context"] == f"{OPENING} {text}"
    editor.wait_for_unasked()
    expect(editor.items.first).to_be_visible()
    editor.wait_for_responses()
    editor.page.wait_for_timeout(READING_MS)
    for key in ("Enter", "ArrowDown", "Tab", "Escape"):  # the input method's
        input_method.press(key, key)
    assert editor.value == f"{OPENING} qui"
    if editor.name == "textarea":  # beside ghost text the list has alternatives only
        expect(editor.items.first).to_have_attribute("aria-current", "true")
    typed = editor.items.first.locator(".tercet-typed").text_content() or ""
    rest = (editor.items.first.text_content() or "").removeprefix(typed)
    assert typed in {"qui", ""}  # a part of a word, or a word that the suggestion follows
    editor.items.first.click()
    accepted = editor.value
    assert re.sub(r"\s", "", accepted) == re.sub(r"\s", "", f"{OPENING} qui{rest}")
    editor.page.keyboard.type("x")
    assert editor.value == f"{accepted}x"
    editor.press("Control+z")
    if editor.name != "codemirror":  # it joins what is typed next with what was inserted during a composition
        editor.press("Control+z")
    assert editor.value == f"{OPENING} qui"


def test_a_character_of_the_layout_is_the_editors(open_each: OpenEditor) -> None:
    editor = open_each(*THREE)
    editor.request()
    session = editor.page.context.new_cdp_session(editor.page)
    event = {"key": "#", "code": "Digit3", "windowsVirtualKeyCode": 51, "modifiers": 1}
    session.send("Input.dispatchKeyEvent", {"type": "keyDown", "text": "#", **event})
    assert editor.value == f"{OPENING}#"


def test_escape_then_tab_leaves(open_each: OpenEditor) -> None:
    editor = open_each(*THREE)
    editor.request()
    editor.press("Escape")
    expect(editor.items).to_have_count(0)
    editor.press("Escape")
    if editor.name == "codemirror":
        editor.page.wait_for_timeout(2100)  # CodeMirror itself gives Tab away for 2 s after Escape
    editor.press("Tab")
    expect(editor.page.get_by_role("button")).to_be_focused()
    assert editor.value == OPENING
    assert len(editor.requests) == 1
    editor.press("Shift+Tab", "Alt+Enter")
    editor.wait_for_list()
    assert editor.value == OPENING


def test_what_came_with_a_word_gives_way(open_each: OpenEditor) -> None:
    """Its comma and its space; the other marks are those of tests/deploy/clients/npm/test_keys.py."""
    editor = open_each(mode="live")
    editor.type_before("The", " water, and more")
    editor.press("Alt+ArrowRight")
    assert editor.value == "The water, "
    editor.press(";")
    assert editor.value == "The water;"
    editor.press("Control+z")
    assert editor.value == "The water, "
    editor.press("Control+z", "Alt+Enter")
    editor.wait_for_list(1)
    editor.press("Alt+ArrowRight", "Space", "x")
    assert editor.value == "The water, x"


def test_enter_is_the_editors_after_a_word_was_taken(open_each: OpenEditor) -> None:
    editor = open_each(mode="live")
    editor.type_before("On the other", " hand, the old man")
    editor.press("Alt+ArrowRight")
    taken = editor.value
    assert len(taken) > len("On the other")
    expect(editor.items.first if editor.is_textarea else editor.ghost).to_be_visible()  # the rest
    editor.press("ArrowRight")
    assert editor.value == taken
    editor.press("Enter")
    assert [line.rstrip() for line in editor.value.split("\n")] == [taken.rstrip(), ""]


def test_a_click_and_a_chord_accept_the_item_with_that_number(open_each: OpenEditor) -> None:
    editor = open_each(*THREE)
    suggestion = editor.request()[2]
    assert editor.items.nth(2).evaluate("(item) => item.value") == 3
    editor.items.nth(2).click()
    assert editor.value.removeprefix(OPENING).strip() == suggestion
    editor.press("Control+z", "Alt+Enter")
    suggestion = editor.wait_for_list()[1]
    editor.press("Alt+2")
    assert editor.value.removeprefix(OPENING).strip() == suggestion


def test_closing_the_editor_aborts_the_request(open_each: OpenEditor) -> None:
    editor = open_each(model="slow")
    editor.type(OPENING)
    editor.press("Alt+Enter")
    expect(editor.items.first).to_be_visible()
    editor.press("F8")
    editor.wait_for_num_aborted(1)
    expect(editor.items).to_have_count(0)
    editor.press("Alt+Enter")  # no listener is left to request or prevent
    assert len(editor.requests) == 1
    if not editor.is_textarea:
        expect(editor.page.locator(".tercet-list, .tercet-ghost")).to_have_count(0)


def test_a_caret_that_moves_closes_the_list_and_selected_text_is_the_editors(open_drawing: OpenEditor) -> None:
    editor = open_drawing(*THREE)
    editor.request()
    for key in ("ArrowLeft", "Shift+ArrowLeft"):
        editor.press("End")
        # ProseMirror learns of the caret from an event that follows the key.
        editor.page.evaluate("() => new Promise(requestAnimationFrame)")
        editor.press("Alt+Enter")
        editor.wait_for_list()
        editor.press(key)
        expect(editor.items).to_have_count(0)
        expect(editor.ghost).to_have_count(0)
    editor.press("Tab")
    assert "\t" in editor.value or editor.value.startswith("  ")
    assert len(editor.requests) == 3


def test_nothing_is_accepted_in_another_text_or_where_it_is_read_only(open_drawing: OpenEditor) -> None:
    editor = open_drawing(*THREE)
    editor.type(OPENING)
    for keys in ("F7 Alt+1 Alt+ArrowRight", "F9 Alt+1 Tab"):  # a program inserts text; the editor becomes read-only
        editor.press("Alt+Enter")
        editor.wait_for_list()
        editor.press(*keys.split())
        assert editor.value == f"{OPENING} more"
        expect(editor.items).to_have_count(0)
        expect(editor.ghost).to_have_count(0)
    assert len(editor.requests) == 2


def test_an_editor_in_a_frame(open_drawing: OpenEditor) -> None:
    editor = open_drawing(*THREE, is_framed=True)
    suggestion = editor.request()[2]
    colors = [
        locator.evaluate("(element) => getComputedStyle(element).color") for locator in (editor.text, editor.ghost)
    ]
    assert colors[0] != colors[1]
    item = box(editor.items.first)
    assert item["y"] >= box(editor.ghost)["y"]
    assert item["width"] > 150  # not squeezed between the caret and the edge of the frame, which is 300 pixels wide
    editor.items.nth(2).click()
    assert editor.value.removeprefix(OPENING).strip() == suggestion
    editor.page.keyboard.type("Then")
    assert editor.value.endswith("Then")


def test_a_suggestion_of_two_lines(open_each: OpenEditor) -> None:
    """The response is a stand-in: no seed of the model yields a line break in every version."""
    editor = open_each(" fell silent.\nThen he spoke.")
    editor.request(num_listed=1)
    editor.press("Enter")
    accepted = f"{OPENING} fell silent.\nThen he spoke."
    assert editor.value.rstrip() == accepted
    if editor.name == "prosemirror":
        expect(editor.text.locator("p")).to_have_count(2)
    editor.page.keyboard.type("Again")
    editor.press("Control+z")
    assert editor.value.rstrip() == accepted
    editor.press("Control+z")
    assert editor.value == OPENING
