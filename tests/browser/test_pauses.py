"""When help comes: one idea at a pause, what Tab does, errors that stay, undo by pauses."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.browser.driver import MIN_VISIBLE_MS, SURE, Editor, answer_with
from tests.browser.editor_pages import OpenEditor
from tests.e2e.harness import PATIENCE_S, until

OpenPage = Callable[..., Editor]
OVERLOADED = {"status": 503, "code": "overloaded", "detail": "Every slot is busy; try again in a second."}


def test_a_pause_lists_the_other_ideas(open_page: OpenPage) -> None:
    """Where no word is sure enough while the writer types, the list has two ideas below the first."""
    editor = open_page(mode="quiet")
    editor.type("The man looked at his watch. ")
    until(lambda: editor.ghost_text, PATIENCE_S, "an idea")
    expect(editor.list).to_be_visible()
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    ideas = [editor.ghost_text, *(re.sub(r"^Alt \d\s*", "", row) for row in editor.suggestions)]
    assert len({idea.split()[0] for idea in ideas}) == len(ideas) >= 2
    before = editor.value
    editor.press("Alt+2")
    assert editor.value.split() == [*before.split(), *ideas[1].split()]


def test_a_rest_ends_by_itself(open_page: OpenPage) -> None:
    editor = open_page(mode="eager")
    clock = editor.page.clock
    clock.install()
    editor.type(SURE)
    until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")
    editor.press("Escape")
    for text in ("rest for 5 s", "rest for 3 s"):
        expect(editor.status).to_contain_text(text)
        clock.run_for(2000)
    num_requests = len(editor.requests)
    editor.type(" the")
    clock.run_for(2000)
    expect(editor.status).not_to_contain_text("rest")
    assert (editor.ghost_text, len(editor.requests)) == ("", num_requests)
    editor.type(" sea")
    until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")


def test_an_idea_comes_in_a_document_that_is_opened_once(open_page: OpenPage) -> None:
    editor = open_page(mode="normal")
    answer_with(editor.page, " and more")
    editor.page.clock.install()
    editor.type(SURE)
    for name in ("New document", "The old man", "New document", "The old man"):
        editor.page.get_by_role("button", name="Documents").click()
        editor.page.locator("#documents").get_by_role("button", name=name).first.click()
        stand_still(editor.page)
    assert [body["context"] for body in editor.ideas] == [SURE]
    assert editor.value == SURE


def test_an_idea_comes_after_a_deletion_and_on_return_once_for_each_place(open_each: OpenEditor) -> None:
    editor = open_each(" and more", mode="live")
    editor.page.clock.install()
    bodies: list[dict[str, Any]] = []
    editor.page.on("request", lambda request: bodies.append(json.loads(request.post_data or "{}")))
    editor.type("The old man\nThe sea x")
    for keys in (
        ["Backspace"],
        ["ArrowUp", "End"],
        ["ArrowDown", "End", "y"],
        ["Backspace", "ArrowUp", "End"],
        ["Home"],
    ):
        editor.press(*keys)
        if "y" in keys:
            editor.page.get_by_role("button").focus()
            editor.text.focus()
        stand_still(editor.page)
    ideas = [body["context"] for body in bodies if body.get("strategy") == "idea" and "stream" not in body]
    assert ideas == ["The old man\nThe sea ", "The old man", "The old man\nThe sea y"]


def stand_still(page: Page) -> None:
    """Let the page's time pass, for longer than until an idea is requested, and the answer arrive."""
    page.wait_for_timeout(100)
    page.clock.run_for(2500)
    page.wait_for_timeout(100)


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


UNFAMILIAR = "the model does not know text like this, so it suggests nothing"
GERMAN = "Der alte Mann sah auf das Meer hinaus und dachte an die Zeit, als er noch jung war und"


def test_the_page_says_that_the_model_does_not_know_the_language(open_page: OpenPage) -> None:
    """Once, in the status line; where the writer goes on in a language that it knows, words come back."""
    editor = open_page(mode="eager")
    editor.type(GERMAN)
    expect(editor.status).to_contain_text(UNFAMILIAR)
    assert editor.ghost_text == ""
    editor.press("Alt+Enter")
    until(lambda: editor.requests[-1].get("stream"), PATIENCE_S, "the request for ideas")
    expect(editor.status).to_contain_text(UNFAMILIAR)
    expect(editor.list).to_be_hidden()
    editor.type(" ging. " + "The old man went home, and his wife was there. She said that he was late, and that " * 2)
    until(lambda: editor.ghost_text, PATIENCE_S, "a word")
    expect(editor.status).not_to_contain_text(UNFAMILIAR)


def test_text_that_the_model_knows_is_not_checked_at_each_key(open_page: OpenPage) -> None:
    editor = open_page(mode="eager")
    editor.type("The old man looked at the sea and")
    until(lambda: editor.ghost_text, PATIENCE_S, "a word, which says that the model knows the text")
    num_checked = len(editor.requests)
    assert editor.requests[0]["familiar_only"]
    assert {(body["strategy"], body["min_probability"]) for body in editor.requests} == {("predict", 0.3)}
    editor.type(" thq")  # no word that is shown goes on like this
    editor.wait_for_num_requests(num_checked + 1)
    assert not any("familiar_only" in body for body in editor.requests[num_checked:])
