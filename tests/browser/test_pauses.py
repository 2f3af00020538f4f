"""When help comes: one idea at a pause, what Tab does, errors that stay, undo by pauses."""

from __future__ import annotations

import time
from collections.abc import Callable

from playwright.sync_api import Route, expect

from tests.browser.driver import MIN_VISIBLE_MS, OPENING, Editor
from tests.e2e.harness import until

OpenPage = Callable[..., Editor]
OVERLOADED = {"status": 503, "code": "overloaded", "detail": "Every slot is busy; try again in a second."}


def test_a_pause_brings_one_idea_to_the_end_of_its_clause(open_page: OpenPage) -> None:
    editor = open_page(mode="normal")
    editor.type(OPENING)
    until(lambda: (editor.status.inner_text(), editor.ideas)[1], 10, "the request for an idea")
    until(lambda: editor.ghost_text, 10, "an idea")
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    ghost = editor.ghost_text
    assert "\n" not in ghost.strip()
    expect(editor.list).to_be_hidden()
    assert len(editor.ideas) == 1
    editor.press("Tab")
    assert editor.value.startswith(OPENING + ghost)


def test_an_idea_stays_while_it_is_typed(open_page: OpenPage) -> None:
    editor = open_page(mode="normal")
    editor.type(OPENING)
    until(lambda: len(editor.ghost_text) > 6, 20, "an idea")
    ghost = editor.ghost_text
    num_requests = len(editor.requests)
    for index, letter in enumerate(ghost[:5], 1):
        editor.page.keyboard.type(letter)
        assert editor.ghost_text == ghost[index:]
    assert len(editor.requests) == num_requests


def test_ten_quick_tabs_accept_or_do_nothing(open_page: OpenPage) -> None:
    """Each 130 ms after a key, as in the report: some were swallowed, others requested ideas."""
    editor = open_page(mode="eager")
    editor.type(OPENING)
    for letter in " the house":
        editor.page.keyboard.type(letter)
        editor.page.wait_for_timeout(130)
        before = editor.value
        editor.press("Tab")
        assert editor.value.startswith(before)
        assert "\t" not in editor.value
        expect(editor.text).to_be_focused()
    assert not [body for body in editor.requests if body.get("stream")]  # no ideas were asked for


def test_an_error_stays_until_a_request_succeeds(open_page: OpenPage) -> None:
    editor = open_page(mode="eager")
    refused: list[float] = []
    begin = time.monotonic()

    def refuse(route: Route) -> None:
        refused.append(time.monotonic())
        route.fulfill(status=503, json=OVERLOADED, headers={"Retry-After": "1"})

    editor.page.route("**/autocomplete", refuse)
    editor.type("The")
    expect(editor.status).to_contain_text("Every slot is busy")
    for letter in " old man looked at":
        editor.page.keyboard.type(letter)
        editor.page.wait_for_timeout(100)
        assert "Every slot is busy" in editor.status.inner_text()
        assert "ready" not in editor.status.inner_text()
    assert len(refused) <= time.monotonic() - begin + len("The") + 2  # then once a second, not at each key
    editor.page.unroute("**/autocomplete")
    # Without another key: the page asks again.
    expect(editor.status).to_contain_text("ready", timeout=10_000)
    expect(editor.status).not_to_contain_text("busy")


def test_undo_goes_back_by_pauses(editor: Editor) -> None:
    sentences = ["It was late.", " She slept.", " He did not."]
    for sentence in sentences:
        editor.type(sentence)
        editor.page.wait_for_timeout(900)
    for end in (2, 1, 0):
        editor.press("Control+z")
        assert editor.value == "".join(sentences[:end])
