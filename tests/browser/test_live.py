"""Suggestions at every key: what is shown while a writer types, which keys are theirs, and what never happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.driver import MIN_VISIBLE_MS, OPENING, PHONE, SURE, Editor, box, violations
from tests.e2e.harness import PATIENCE_S, until

OpenPage = Callable[..., Editor]
STILL_MS = 1300  # longer than the longest time until the list opens


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


def test_every_insertion_requests_predictions(live: Editor) -> None:
    live.text.focus()
    for number, letter in enumerate(SURE, 1):
        live.page.keyboard.type(letter)
        live.wait_for_num_requests(number)
    contexts = [body["context"] for body in live.requests]
    assert sorted(set(contexts), key=len) == [SURE[:end] for end in range(1, len(SURE) + 1)]
    assert {(body["strategy"], body["min_probability"]) for body in live.requests} == {("predict", 0.3)}
    until(lambda: live.ghost_text, PATIENCE_S, "ghost text")


def test_the_list_waits_until_the_first_suggestion_stands_still(live: Editor) -> None:
    live.type(OPENING)
    until(lambda: live.ghost_text, PATIENCE_S, "ghost text")
    expect(live.list).to_be_hidden()
    expect(live.list).to_be_visible()
    assert len(live.suggestions) >= 2
    expect(live.announcements).to_have_text("")


# ---- taking ----


def test_tab_takes_the_first_with_a_space_that_gives_way(live: Editor) -> None:
    ghost = type_until_shown(live)
    live.press("Tab")
    assert live.value == f"{SURE}{ghost} "
    live.type(",")
    assert live.value == f"{SURE}{ghost},"
    ghost = type_until_shown(live, " ")
    before = live.value
    live.press("Tab")
    live.type(" x")  # the typed space is the one that came
    assert live.value == f"{before}{ghost} x"
    live.press("Enter")
    ghost = type_until_shown(live, "He said that")
    live.press("Tab", "Enter")
    assert live.value.endswith(f"He said that{ghost}\n")


def test_chords_take_any_of_the_list(live: Editor) -> None:
    type_until_shown(live, OPENING)
    expect(live.list).to_be_visible()
    live.page.wait_for_timeout(MIN_VISIBLE_MS)
    second = live.options.first.locator("span").last.text_content()  # the first is ghost text
    live.press("Alt+2")
    assert second
    assert live.value.removeprefix(OPENING).strip() == second
    undone = live.value
    live.press("Control+z")
    assert live.value == OPENING
    live.press("Control+Shift+Z")
    assert live.value == undone


def test_a_held_tab_takes_one_suggestion(live: Editor) -> None:
    ghost = type_until_shown(live)
    hold(live.page, "Tab", 40)
    assert live.value == f"{SURE}{ghost} "


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

LINES = "one\ntwo\nIt was imposs"  # "ible to" follows, but for what is sampled


def test_enter_and_arrows_are_the_texts_after_a_word_was_taken_with_the_button(live: Editor) -> None:
    type_until_shown(live, LINES)
    live.press("Alt+Enter")
    live.wait_for_response()
    live.page.get_by_role("button", name="next word").click()
    taken, ghost = live.value, live.ghost_text
    assert ghost
    live.press("ArrowRight", "ArrowDown")  # at the end of the text nothing moves
    assert (live.value, live.ghost_text, live.caret) == (taken, ghost, len(taken))
    live.press("Enter")
    assert live.value == f"{taken.rstrip()}\n"  # the space that came with the word gives way


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


def test_escape_cancels_what_is_under_way_and_the_next_tab_stays(open_page: OpenPage) -> None:
    editor = open_page(mode="pauses")
    editor.type(SURE)
    editor.press("Escape")
    editor.page.wait_for_timeout(1200)  # longer than a pause
    assert not editor.requests
    expect(editor.list).to_be_hidden()
    editor.press("Tab")
    expect(editor.text).to_be_focused()
    assert not editor.requests
    editor.press("Control+Space")
    editor.wait_for_response()


def test_nothing_is_suggested_after_deletion_and_undo(live: Editor) -> None:
    """After a deletion, an idea at the pause; after an undo, not even that."""
    ghost = type_until_shown(live)
    live.press("Tab")
    assert ghost
    type_until_shown(live, "the")
    live.press("Backspace")
    num_requests = len(live.requests + live.ideas)
    assert live.ghost_text == ""
    live.press("Control+z", "Control+z")
    live.page.wait_for_timeout(STILL_MS)
    live.press("Control+Backspace")
    live.page.wait_for_timeout(STILL_MS // 2)
    assert (live.ghost_text, len(live.requests + live.ideas)) == ("", num_requests)
    until(
        lambda: live.value and len(live.requests + live.ideas) == num_requests + 1,
        PATIENCE_S,
        "the request for an idea",
    )


def test_nothing_unasked_before_text_on_the_line(live: Editor) -> None:
    live.type("He opened the dor")
    live.press("ArrowLeft", "ArrowLeft")
    num_requests = len(live.requests)
    live.type("o")
    live.page.wait_for_timeout(STILL_MS)
    assert (live.ghost_text, len(live.requests)) == ("", num_requests)
    expect(live.list).to_be_hidden()


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


def test_asked_before_a_word_the_missing_space_comes_too(live: Editor) -> None:
    live.type("He looked at her and opened the of the house.")
    live.press(*["ArrowLeft"] * len("of the house."))
    live.press("Alt+Enter")
    expect(live.page.locator("#latency")).to_contain_text("ms")
    live.page.wait_for_timeout(MIN_VISIBLE_MS)
    assert live.requests[-1]["suffix"] == "of the house."
    live.press("Enter")
    assert re.fullmatch(r"He looked at her and opened the \S.* of the house\.", live.value)


def test_no_list_hides_the_text_below_the_caret(live: Editor) -> None:
    live.type("The first paragraph\n\nThe second paragraph of it.")
    live.press("ArrowUp", "ArrowUp", "End")
    live.type(" of the old man and")
    before = live.value
    until(lambda: live.ghost_text, PATIENCE_S, "ghost text")
    live.page.wait_for_timeout(STILL_MS)
    expect(live.list).to_be_hidden()
    assert live.value == before
    ghost = box(live.ghost)
    assert ghost["y"] + ghost["height"] <= box(live.text.locator(".cm-line").last)["y"]


# ---- phones, zoom, contrast ----

PHONE_WITH_KEYBOARD = {**PHONE, "viewport": {"width": 360, "height": 380}}


def test_on_a_phone_with_its_keyboard_nothing_scrolls_and_no_button_is_cut(open_page: OpenPage) -> None:
    editor = open_page(mode="eager", context=PHONE_WITH_KEYBOARD)
    type_until_shown(editor, (f"{SURE} said nothing. ") * 4 + OPENING)
    position = "[scrollY, document.querySelector('.tercet-ghost').getBoundingClientRect().top]"
    before = editor.page.evaluate(position)
    expect(editor.list).to_be_visible()
    assert editor.page.evaluate(position) == before
    # The caret's line; where the ghost text goes on in another one, the list, which repeats it, may cover that.
    caret = editor.ghost.evaluate("ghost => ghost.getClientRects()[0].toJSON()")
    panel, footer = box(editor.page.locator("#panel")), box(editor.page.locator("footer"))
    assert 0 <= caret["y"] < caret["y"] + caret["height"] <= panel["y"]
    assert panel["y"] + panel["height"] <= footer["y"]
    for button in editor.page.locator("#panel-actions button:visible").all():
        place = box(button)
        assert panel["y"] <= place["y"] < place["y"] + place["height"] <= panel["y"] + panel["height"]
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    editor.page.evaluate(
        """() => {
          const panel = document.querySelector("#panel");
          window.wasHidden = false;
          new MutationObserver(() => (window.wasHidden ||= panel.hidden)).observe(panel, { attributes: true });
        }"""
    )
    text = editor.value
    editor.options.nth(1).tap()
    until(lambda: editor.value != text, PATIENCE_S, "the accepted suggestion")
    assert editor.page.evaluate("wasHidden")  # the list of what follows may be open by now
    assert abs(editor.page.evaluate("scrollY") - before[0]) <= 70  # at most two lines, which were inserted


@pytest.mark.parametrize(
    "context",
    [
        {"viewport": {"width": 550, "height": 380}, "device_scale_factor": 2},  # 200 % of 1100 × 760
        {"color_scheme": "dark", "reduced_motion": "reduce"},
        {"forced_colors": "active"},
        PHONE_WITH_KEYBOARD,
    ],
    ids=["zoom", "dark", "forced colors", "phone"],
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


def test_a_steady_writer_sees_no_list_before_a_pause(live: Editor) -> None:
    """The page's clock is the test's, and the first answer says what the writer types, so that it stays on show."""
    text = f"She went down to the harbour with her brother. {OPENING}"

    def answer(route: Route) -> None:
        rest = text[len((route.request.post_data_json or {})["context"]) :]
        sentences = [{"value": value, "seed": seed} for seed, value in enumerate((f"{rest} then", "; otherwise"))]
        route.fulfill(json={"id": "1", "sentences": sentences})

    live.page.route("**/autocomplete", answer)
    clock = live.page.context.clock
    clock.install()
    clock.pause_at(datetime.now(UTC) + timedelta(minutes=1))
    live.page.evaluate(
        """() => {
          window.numOpenings = 0;
          const panel = document.querySelector("#panel");
          new MutationObserver(() => (window.numOpenings += Number(!panel.hidden)))
            .observe(panel, { attributes: true, attributeFilter: ["hidden"] });
        }"""
    )
    live.text.focus()
    for end, letter in enumerate(text, 1):
        live.page.keyboard.type(letter)
        expect(live.ghost).to_have_text(f"{text[end:]} then")
        clock.run_for(100)
    assert live.page.evaluate("numOpenings") == 0
    clock.run_for(STILL_MS)
    expect(live.list).to_be_visible()
