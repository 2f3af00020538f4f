"""Writing in the page, key by key, against real pools."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from playwright.sync_api import Route, expect

from tests.browser.driver import OPENING, Editor
from tests.e2e.harness import Tercet, until

OpenPage = Callable[..., Editor]
SLOW_SLOT = 1


def metric(tercet: Tercet, name: str, **labels: object) -> float:
    """Sum of a metric's values that have these labels."""
    total = 0.0
    for line in tercet.client.get("/metrics").text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rpartition(" ")[2])
    return total


def in_flight(tercet: Tercet) -> float:
    return metric(tercet, "tercet_slot_in_flight_branches", slot=SLOW_SLOT)


def num_cancelled(tercet: Tercet) -> float:
    return metric(tercet, "tercet_slot_sequences_total", slot=SLOW_SLOT, finish_reason="cancelled")


def saved_characters(tercet: Tercet) -> float:
    return metric(tercet, "tercet_saved_characters_total")


def squeeze(text: str) -> str:
    """As a list shows it."""
    return re.sub(r"\s*\n\s*", " ¶ ", text.strip())


# ---- asking ----


def test_suggestions_stream_in(slow_editor: Editor) -> None:
    slow_editor.write(OPENING)
    slow_editor.press("Tab")
    seen: list[list[str]] = []
    until(lambda: _watch(slow_editor, seen) and "ms" in slow_editor.status.inner_text(), 10, "the whole answer")
    assert len(seen) >= 5, seen
    for before, after in pairwise(seen):
        # What is there is never taken back; a row may go where another comes in its place (a duplicate).
        kept = [row for row in before if any(later.startswith(row) for later in after)]
        assert len(kept) >= len(before) - 1
    assert len(seen[-1]) == 3
    assert slow_editor.value == OPENING
    assert len(slow_editor.asked) == 1


def _watch(editor: Editor, seen: list[list[str]]) -> bool:
    rows = editor.suggestions
    if rows and (not seen or rows != seen[-1]):
        seen.append(rows)
    return bool(rows)


def test_a_pause_asks_by_itself_and_leaves_enter_alone(open_page: OpenPage) -> None:
    editor = open_page()
    editor.write(OPENING)
    editor.wait_until_whole()
    assert len(editor.asked) == 1
    editor.press("Enter")
    assert editor.value == OPENING + "\n"
    editor.wait_until_asked(2)
    editor.wait_until_whole()
    assert [body["context"] for body in editor.asked] == [OPENING, OPENING + "\n"]
    editor.press("ArrowDown")  # one was chosen now
    ghost = editor.ghost_text
    editor.press("Enter")
    assert editor.value == OPENING + "\n" + ghost


def test_tab_takes_nothing_that_was_not_yet_seen(open_page: OpenPage) -> None:
    """A pause asks just before the key: the key is taken for the question it was."""
    editor = open_page()
    held: list[Route] = []
    editor.page.route("**/autocomplete", lambda route: held.append(route))  # noqa: PLW0108 - Playwright marks it
    editor.write(OPENING)
    expect(editor.page.locator("#latency")).to_have_text("…")
    editor.press("Tab", "Tab")
    held[0].continue_()
    editor.wait_until_whole()
    assert (editor.value, len(editor.asked)) == (OPENING, 1)
    ghost = editor.ghost_text
    editor.press("Enter")  # it counts as asked for
    assert editor.value == OPENING + ghost


def test_steady_typing_does_not_ask(open_page: OpenPage) -> None:
    """No gap is longer than the writer's own, though some are long for a machine."""
    editor = open_page()
    text = OPENING[:20]
    editor.text.focus()
    for index, letter in enumerate(text):
        editor.page.keyboard.type(letter)
        editor.page.wait_for_timeout(60 + 30 * (index % 3))
    editor.wait_until_asked(1)
    editor.wait_until_whole()
    assert editor.asked[-1]["context"] == text
    assert len(editor.asked) <= 3  # a busy machine may make a gap that nobody made


# ---- choosing and taking ----


def test_arrows_choose_with_the_ghost_in_place(editor: Editor) -> None:
    rows = editor.ask()
    assert len(rows) == 3
    for keys, place in [([], 0), (["ArrowDown"], 1), (["ArrowDown"], 2), (["ArrowDown"], 0), (["ArrowUp"], 2)]:
        editor.press(*keys)
        expect(editor.chosen).to_have_text(rows[place], use_inner_text=True)
        assert squeeze(editor.ghost_text) in rows[place]
    assert editor.value == OPENING  # the ghost is seen, and not there
    ghost = editor.ghost.bounding_box()
    text = editor.text.bounding_box()
    assert ghost is not None
    assert text is not None
    assert text["y"] < ghost["y"] < text["y"] + 200


@pytest.mark.parametrize("key", ["Enter", "Tab"])
def test_takes_the_chosen_one(editor: Editor, key: str) -> None:
    editor.ask()
    editor.press("ArrowDown")
    ghost = editor.ghost_text
    editor.press(key)
    assert editor.value == OPENING + ghost
    expect(editor.list).to_be_hidden()
    assert editor.ghost_text == ""


def test_right_takes_a_word_at_a_time(editor: Editor) -> None:
    editor.ask()
    whole = editor.ghost_text
    taken = ""
    for _ in range(4):
        editor.press("ArrowRight")
        word = editor.value.removeprefix(OPENING + taken)
        assert re.fullmatch(r"\s*[^\s]+", word), word
        taken += word
        assert editor.ghost_text == whole.removeprefix(taken)
    assert whole.startswith(taken)
    assert len(editor.asked) == 1
    editor.press("Enter")
    assert editor.value == OPENING + whole


def test_escape_dismisses_and_the_next_keys_are_the_texts_own(editor: Editor) -> None:
    editor.ask()
    editor.press("Escape")
    expect(editor.list).to_be_hidden()
    assert (editor.value, editor.ghost_text) == (OPENING, "")
    editor.press("Enter", "ArrowUp", "x", "ArrowRight", "y")
    assert editor.value == f"x{OPENING[0]}y{OPENING[1:]}\n"
    assert len(editor.asked) == 1


def test_takes_in_the_middle_of_a_text(editor: Editor) -> None:
    editor.write("Once there was a king. He lived alone.")
    for _ in range(len(" He lived alone.")):
        editor.press("ArrowLeft")
    editor.press("Tab")
    editor.wait_until_whole()
    assert editor.asked[-1]["context"] == "Once there was a king."
    ghost = editor.ghost_text
    editor.press("Enter")
    assert editor.value == f"Once there was a king.{ghost} He lived alone."
    editor.write("X")
    assert editor.value == f"Once there was a king.{ghost}X He lived alone."


def test_moving_the_cursor_ends_the_suggestions(editor: Editor) -> None:
    for key in ("ArrowLeft", "Home", "Shift+ArrowLeft"):
        editor.press("Control+End")
        editor.ask(" and then")
        editor.press(key)
        expect(editor.list).to_be_hidden()
        assert editor.ghost_text == ""


def test_a_pointer_can_do_it_too(editor: Editor) -> None:
    editor.write(OPENING)
    editor.page.get_by_role("button", name="Suggest", exact=True).click()
    rows = editor.wait_until_whole()
    editor.options.nth(2).click()
    assert squeeze(editor.value.removeprefix(OPENING)) in rows[2]
    editor.press("Tab")  # the text still has the keys
    editor.wait_until_whole()


# ---- typing on ----


def test_what_a_suggestion_says_can_be_typed_without_a_new_request(open_page: OpenPage) -> None:
    editor = open_page()  # pauses ask, but not here
    editor.ask()
    whole = editor.ghost_text
    for place, letter in enumerate(whole[:8]):
        editor.page.keyboard.insert_text(letter) if letter == "\n" else editor.page.keyboard.type(letter)
        editor.page.wait_for_timeout(50)
        assert editor.ghost_text == whole[place + 1 :]
        expect(editor.list).to_be_visible()
    editor.page.wait_for_timeout(1200)  # longer than any pause
    assert len(editor.asked) == 1
    editor.press("Backspace")
    assert editor.ghost_text == whole[7:]
    editor.press("Enter")
    assert editor.value == OPENING + whole
    assert len(editor.asked) == 1


def test_another_key_ends_it_and_the_pause_after_it_asks_anew(open_page: OpenPage) -> None:
    editor = open_page()
    editor.ask()
    editor.write("~")
    assert editor.ghost_text == ""
    expect(editor.list).to_be_hidden()
    editor.wait_until_asked(2)
    editor.wait_until_whole()
    assert [body["context"] for body in editor.asked] == [OPENING, OPENING + "~"]


def test_a_key_cancels_the_old_request_in_the_worker(open_page: OpenPage) -> None:
    editor = open_page(pauses=False, model_size="slow", length=256)
    tercet = editor.tercet
    before = num_cancelled(tercet)
    editor.write(OPENING)
    editor.press("Tab")
    expect(editor.options.first).to_be_visible()
    until(lambda: in_flight(tercet) == 3, 5, "three sequences in the engine")
    editor.write("~")
    pressed = time.monotonic()
    until(lambda: in_flight(tercet) == 0, 3, "none of them left")
    print(f"gone {1e3 * (time.monotonic() - pressed):.0f} ms after the key")
    until(lambda: num_cancelled(tercet) == before + 3, 2, "three sequences cancelled")
    expect(editor.list).to_be_hidden()


def test_escape_cancels_too_and_a_newer_request_ends_the_older(open_page: OpenPage) -> None:
    editor = open_page(pauses=False, model_size="slow", length=256)
    editor.write(OPENING)
    editor.press("Tab")
    expect(editor.options.first).to_be_visible()
    editor.press("Escape")
    until(lambda: in_flight(editor.tercet) == 0, 3, "none left after Escape")
    editor.press("Tab", "Tab", "Tab")  # those that come before there is anything to take change nothing
    assert len(editor.asked) == 2
    expect(editor.options.first).to_be_visible()
    editor.page.get_by_role("button", name="Suggest", exact=True).click()
    expect(editor.options.first).to_be_visible()
    until(lambda: in_flight(editor.tercet) == 3, 3, "the newer request's alone")
    assert len(editor.asked) == 3
    assert editor.value == OPENING


# ---- undo ----


def test_undo_takes_back_what_was_taken_and_nothing_else(editor: Editor) -> None:
    editor.ask()
    ghost = editor.ghost_text
    editor.press("Enter")
    editor.write(" - and on")
    steps = [OPENING + ghost, OPENING, ""]
    for step in steps:
        editor.press("Control+z")
        assert editor.value == step
    for step in [OPENING, OPENING + ghost, OPENING + ghost + " - and on"]:
        editor.press("Control+Shift+z")
        assert editor.value == step


def test_what_was_typed_through_is_one_step_of_undo(editor: Editor) -> None:
    editor.ask()
    for letter in editor.ghost_text[:9].replace("\n", ""):
        editor.page.keyboard.type(letter)
    editor.press("Escape", "Control+z")
    assert OPENING.startswith(editor.value)


def test_undo_goes_back_word_by_word(editor: Editor) -> None:
    editor.ask()
    values = [editor.value]
    for _ in range(3):
        editor.press("ArrowRight")
        values.append(editor.value)
    for value in reversed(values[:-1]):
        editor.press("Control+z")
        assert editor.value == value


def test_clearing_can_be_undone_and_is_kept(editor: Editor) -> None:
    editor.write("Something worth keeping.")
    editor.page.get_by_role("button", name="Clear").click()
    assert editor.value == ""
    editor.press("Control+z")
    assert editor.value == "Something worth keeping."
    editor.page.get_by_role("button", name="Clear").click()
    editor.page.reload()
    assert editor.value == ""


def test_the_text_stays_in_this_browser(editor: Editor) -> None:
    editor.write("One line.\nAnother – with “marks” and ümlauts 🙂.")
    value = editor.value
    editor.page.reload()
    assert editor.value == value
    assert not editor.asked
    editor.write("!")  # the cursor is where the writing goes on
    assert editor.value == value + "!"


# ---- what goes with a request, and what is told ----


def test_settings_by_keyboard_go_with_the_request_and_stay(editor: Editor) -> None:
    page = editor.page

    def press_on(label: str, *keys: str) -> None:
        page.get_by_label(label, exact=True).focus()
        editor.press(*keys)

    page.get_by_role("button", name="Settings").focus()
    editor.press("Enter")
    press_on("Model", "ArrowDown")
    press_on("Length", "Home", "ArrowRight", "ArrowRight")
    press_on("Temperature", "ArrowLeft", "ArrowLeft")
    press_on("Top-p", "ArrowLeft")
    press_on("Top-k", "Control+a", "4", "0")
    press_on("Time limit, seconds", "2", ".", "5")
    press_on("End at a new line", "Space")
    editor.press("Escape")
    expect(page.get_by_role("heading", name="Settings")).to_be_hidden()
    page.reload()
    expect(editor.status).to_contain_text("2 of 2 slots ready")
    editor.ask()
    body = editor.asked[-1]
    wanted = {
        "model_size": "slow", "length": 6, "temperature": 0.7, "top_p": 0.79, "top_k": 40, "max_time": 2.5,
        "single_line": True, "context": OPENING, "stream": True,
    }  # fmt: skip
    assert {name: body[name] for name in wanted} == wanted
    assert body.keys() - wanted.keys() == {"seed", "session"}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    editor.press("Escape")
    editor.text.focus()
    editor.press("Tab")
    editor.wait_until_whole()
    assert (editor.asked[-1]["model_size"], editor.asked[-1]["length"]) == ("embedded", 20)
    assert "max_time" not in editor.asked[-1]


def test_details_on_demand(editor: Editor) -> None:
    editor.ask()
    editor.press("ArrowDown")
    details = editor.page.get_by_role("region", name="Details")
    expect(details).to_be_hidden()
    editor.press("Control+i")
    expect(details).to_contain_text("score")
    expect(details).to_contain_text(re.compile(r"seed \d+"))
    ghost = editor.ghost_text
    tokens = editor.page.locator("#details .token").evaluate_all("all => all.map(one => one.firstChild.textContent)")
    assert re.sub(r"[\s¶]", "", ghost).startswith(re.sub(r"[\s¶␣]", "", "".join(tokens))[: len(ghost) // 2])
    assert len(tokens) >= len(ghost.split()) > 0  # no token says parts of two words
    assert details.locator(".alternative").count() > len(tokens)
    assert editor.value == OPENING
    editor.press("ArrowDown")  # another's, and no further request
    expect(details).to_contain_text("score")
    assert [body.get("explain") for body in editor.asked] == [None, 3]
    editor.press("Shift+Tab")  # into the details, to scroll them; Tab leads back
    expect(details).to_be_focused()
    expect(editor.list).to_be_visible()
    editor.press("Tab")
    expect(editor.text).to_be_focused()
    editor.press("Control+i")
    expect(details).to_be_hidden()
    expect(editor.list).to_be_visible()


def test_the_status_line(editor: Editor) -> None:
    expect(editor.status).to_contain_text("2 of 2 slots ready")
    expect(editor.status).to_contain_text("0 keystrokes saved")
    editor.ask()
    length = len(editor.ghost_text)
    editor.press("Enter")
    expect(editor.status).to_contain_text(f"{length - 2} keystrokes saved")  # Tab and Enter were pressed for it
    editor.page.reload()
    expect(editor.status).to_contain_text(f"{length - 2} keystrokes saved")


def test_what_was_taken_is_told_to_the_server(editor: Editor) -> None:
    tercet = editor.tercet
    accepted = metric(tercet, "tercet_suggestions_total", action="accepted")
    rejected = metric(tercet, "tercet_suggestions_total", action="rejected")
    characters = saved_characters(tercet)
    editor.ask()
    length = len(editor.ghost_text)
    editor.press("Enter")
    until(lambda: metric(tercet, "tercet_suggestions_total", action="accepted") == accepted + 1, 3, "accepted")
    assert saved_characters(tercet) == characters + length
    editor.ask()
    editor.press("Escape")
    until(lambda: metric(tercet, "tercet_suggestions_total", action="rejected") == rejected + 1, 3, "rejected")


def test_what_was_taken_of_an_answer_in_the_making_is_told_too(slow_editor: Editor) -> None:
    characters = saved_characters(slow_editor.tercet)
    slow_editor.write(OPENING)
    slow_editor.press("Tab")
    until(lambda: len(slow_editor.ghost_text) > 10, 5, "some words")
    slow_editor.press("Enter")
    length = len(slow_editor.value) - len(OPENING)
    assert length > 10
    expect(slow_editor.list).to_be_hidden()
    until(lambda: saved_characters(slow_editor.tercet) == characters + length, 5, "what was taken")


def test_a_key_is_asked_for_where_one_is_needed(editor: Editor) -> None:
    """The server has no keys yet, so its refusal is made up here."""
    sent: list[str | None] = []

    def guard(route: Route) -> None:
        sent.append(route.request.headers.get("authorization"))
        if sent[-1] == "Bearer sesame":
            route.continue_()
        else:
            problem = {"status": 401, "code": "unauthorized", "detail": "Send a key."}
            route.fulfill(status=401, json=problem, content_type="application/problem+json")

    editor.page.route("**/autocomplete", guard)
    field = editor.page.get_by_label(re.compile("key"))
    expect(field).to_be_hidden()
    editor.write(OPENING)
    editor.press("Tab")
    expect(field).to_be_focused()
    expect(editor.status).to_contain_text("Send a key.")
    editor.page.keyboard.type("guess")
    editor.press("Enter")
    expect(editor.page.get_by_text("The server refused that key")).to_be_visible()
    expect(field).to_be_focused()
    editor.page.keyboard.type("sesame")
    editor.press("Enter")
    editor.wait_until_whole()
    expect(field).to_be_hidden()
    expect(editor.text).to_be_focused()
    assert sent == [None, "Bearer guess", "Bearer sesame"]


def test_refusals_and_a_lost_server_are_told_and_writing_goes_on(editor: Editor) -> None:
    """Made up here: a refusal's own words, then a connection that breaks."""
    problem = {"status": 503, "code": "overloaded", "detail": "Every slot is busy; try again in a second."}
    editor.page.route("**/autocomplete", lambda route: route.fulfill(status=503, json=problem))
    editor.write(OPENING)
    editor.press("Tab")
    expect(editor.status).to_contain_text("Every slot is busy")
    expect(editor.news).to_have_text("Every slot is busy; try again in a second.")
    # In the first one's place: between the two, a request of the pause after a key could be answered.
    editor.page.route("**/autocomplete", lambda route: route.abort())
    editor.press("Tab")
    expect(editor.status).to_contain_text("The server is not responding.")
    editor.page.unroute("**/autocomplete")
    editor.faults.clear()  # the browser's own word on the broken connection
    assert len(editor.ask(" then")) == 3
    expect(editor.status).not_to_contain_text("not responding")


def test_of_a_long_document_its_end_is_sent(editor: Editor) -> None:
    editor.text.focus()
    sentence = "It was a long and weary way that they had to go. "
    editor.page.keyboard.insert_text(sentence * 1000)
    begins = set()
    for word in ("And", " so", " they", " went"):
        editor.write(word)
        editor.press("Tab")
        editor.wait_until_whole()
        editor.press("Escape")
        context = editor.asked[-1]["context"]
        assert editor.value.endswith(context)
        assert 8192 <= len(context) < 8192 + 4096
        begins.add(len(editor.value) - len(context))
    assert len(begins) == 1  # it begins where it began, so that what was computed of it can be used again


# ---- any order of keys ----


def test_any_order_of_keys(open_page: OpenPage) -> None:
    """Nothing breaks, and whatever went before, asking and taking works. The slow model is still writing half of
    the time."""
    keys = [
        "Tab", "Tab", "Tab", "Enter", "Escape", "ArrowUp", "ArrowDown", "ArrowRight", "ArrowLeft", "Backspace", "Home",
        "End", "Control+z", "Control+Shift+z", "Control+i", "Control+a", "Delete", "Shift+ArrowLeft", "a", ",", "Space",
    ]  # fmt: skip
    chance = random.Random(5)
    editor = open_page(model_size="slow", length=12)
    editor.write(OPENING)
    for _ in range(150):
        key = chance.choice(keys)
        if key == "Tab" and not editor.text.evaluate("one => one === document.activeElement"):
            editor.text.focus()  # Escape and Tab led out of the text, as they should
        editor.press(key)
        if chance.random() < 0.3:
            editor.page.wait_for_timeout(chance.choice([5, 40, 150]))
    editor.text.focus()
    editor.press("Escape", "Escape", "Control+a", "Delete")
    assert editor.value == ""
    editor.ask()
    ghost = editor.ghost_text
    editor.press("Enter")
    assert editor.value == OPENING + ghost
    until(lambda: in_flight(editor.tercet) == 0, 5, "nothing left running")
