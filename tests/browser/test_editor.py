"""The editor page with a real browser, gateway and worker pool: requests, suggestions, undo, settings, feedback."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise

from playwright.sync_api import expect

from tests.browser.driver import MIN_VISIBLE_MS, OPENING, Editor, box
from tests.e2e.harness import PATIENCE_S, Tercet, metric, until

OpenPage = Callable[..., Editor]


def num_in_flight(tercet: Tercet) -> float:
    """Sequences in the slow slot."""
    return metric(tercet, 'tercet_slot_in_flight_branches{slot="1"}')


def num_cancelled(tercet: Tercet) -> float:
    return metric(tercet, 'tercet_slot_sequences_total{finish_reason="cancelled",slot="1"}')


def num_suggestions(tercet: Tercet, action: str) -> float:
    return metric(tercet, f'tercet_suggestions_total{{action="{action}"')


def saved_characters(tercet: Tercet) -> float:
    return metric(tercet, "tercet_saved_characters_total")


def as_single_line(text: str) -> str:
    """A suggestion as the panel shows it."""
    return re.sub(r"\s*\n\s*", " ¶ ", text.strip())


# ---- requests ----


# Keeps a streamed answer from the page, from its first complete sentence on, until `release()`.
HOLD = """() => {
  const original = fetch;
  const released = new Promise((resolve) => { window.release = resolve; });
  const transform = async (chunk, controller) => {
    const [tokens, ...rest] = chunk.split(/(?=event: (?:sentence|done))/);
    controller.enqueue(tokens);
    if (rest.length) controller.enqueue((await released, rest.join("")));
  };
  window.fetch = async (...request) => {
    const response = await original(...request);
    if (!response.headers.get("Content-Type").startsWith("text/event-stream")) return response;
    const events = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new TransformStream({ transform }));
    return new Response(events.pipeThrough(new TextEncoderStream()), response);
  };
}"""


def test_suggestions_stream_in(slow_editor: Editor) -> None:
    slow_editor.page.evaluate(HOLD)
    slow_editor.type(OPENING)
    slow_editor.press("Alt+Enter")
    snapshots: list[list[str]] = []
    until(lambda: _take_snapshot(slow_editor, snapshots), PATIENCE_S, "the first tokens")
    assert slow_editor.latency.text_content() == "…"
    slow_editor.page.evaluate("release()")
    until(
        lambda: _take_snapshot(slow_editor, snapshots) and slow_editor.latency.text_content() != "…",
        PATIENCE_S,
        "the complete response",
    )
    for before, after in pairwise(snapshots):
        # Shown text never changes, but a duplicate may disappear when another branch replaces it.
        kept = [row for row in before if any(later.startswith(row) for later in after)]
        assert len(kept) >= len(before) - 1
    assert len(snapshots[-1]) == 3
    assert slow_editor.value == OPENING
    assert len(slow_editor.requests) == 1


def _take_snapshot(editor: Editor, snapshots: list[list[str]]) -> bool:
    """Append the suggestions, without their numbers, if they changed; whether there are any."""
    rows = [re.sub(r"^Alt \d\s*", "", row) for row in editor.suggestions]
    if rows and (not snapshots or rows != snapshots[-1]):
        snapshots.append(rows)
    return bool(rows)


# ---- choosing and accepting ----


def test_escape_dismisses_and_later_keys_edit_the_text(editor: Editor) -> None:
    editor.request_suggestions()
    editor.press("Escape")
    expect(editor.list).to_be_hidden()
    assert (editor.value, editor.ghost_text) == (OPENING, "")
    editor.press("Enter", "ArrowUp", "x", "ArrowRight", "y")
    assert editor.value == f"x{OPENING[0]}y{OPENING[1:]}\n"
    assert len(editor.requests) == 1


def test_a_suggestion_can_be_accepted_in_the_middle_of_a_text(editor: Editor) -> None:
    # In mid-sentence: after a full stop, the model may predict the end of the text.
    editor.type("Once there was a king who in a castle.")
    for _ in range(len(" in a castle.")):
        editor.press("ArrowLeft")
    editor.press("Alt+Enter")
    editor.wait_for_response()
    assert editor.requests[-1]["context"] == "Once there was a king who"
    assert editor.requests[-1]["suffix"] == " in a castle."
    [first, *_] = editor.suggestions
    assert editor.ghost_text.strip() in first  # before the text that follows, which it moves
    panel, line = box(editor.page.locator("#panel")), box(editor.text.locator(".cm-line").last)
    assert line["y"] + line["height"] <= panel["y"]  # the text that a suggestion must fit is not hidden
    editor.press("Enter")
    accepted = editor.value.removeprefix("Once there was a king who").removesuffix(" in a castle.")
    assert first.endswith(accepted.strip())
    assert accepted.strip()
    editor.type("X")
    assert editor.value == f"Once there was a king who{accepted}X in a castle."


def test_the_pointer_requests_and_accepts(editor: Editor) -> None:
    editor.type(OPENING)
    editor.page.get_by_role("button", name="Suggest", exact=True).click()
    rows = editor.wait_for_response()
    editor.options.nth(2).click()
    taken = editor.value
    assert as_single_line(taken.removeprefix(OPENING)) in rows[2]
    editor.press("Alt+Enter")  # the text kept the focus
    editor.wait_for_response()
    editor.page.get_by_role("button", name="next word").click()
    assert len(editor.value.removeprefix(taken).split()) == 1


# ---- requests that are cancelled ----


def test_an_edit_escape_and_a_newer_request_cancel_the_one_in_flight_in_the_worker(open_page: OpenPage) -> None:
    editor = open_page(mode="off", model_size="slow", length=256)
    before = num_cancelled(editor.tercet)
    editor.type(OPENING)

    def request() -> None:
        editor.press("Alt+Enter")
        expect(editor.options.first).to_be_visible()
        until(lambda: num_in_flight(editor.tercet) == 3, PATIENCE_S, "three sequences in the engine")

    def wait_until_cancelled(num_requests: int, by: str) -> None:
        num = before + 3 * num_requests
        until(lambda: num_cancelled(editor.tercet) == num, PATIENCE_S, f"three sequences cancelled by {by}")

    request()
    editor.type("~")
    wait_until_cancelled(1, "an edit")
    expect(editor.list).to_be_hidden()
    request()
    editor.press("Escape")
    wait_until_cancelled(2, "Escape")
    assert num_in_flight(editor.tercet) == 0
    editor.press("Alt+Enter", "Tab", "Tab")  # the Tabs find nothing to accept
    expect(editor.options.first).to_be_visible()
    editor.page.get_by_role("button", name="Suggest", exact=True).click()
    wait_until_cancelled(3, "the newer request")
    expect(editor.options.first).to_be_visible()
    assert len(editor.requests) == 4
    assert editor.value == f"{OPENING}~"


# ---- undo ----


def test_undo_removes_exactly_the_accepted_suggestion(editor: Editor) -> None:
    editor.request_suggestions()
    ghost = editor.ghost_text
    editor.press("Enter")
    expect(editor.list).to_be_hidden()
    assert editor.ghost_text == ""
    editor.type("- and on")
    steps = [OPENING + ghost + " ", OPENING, ""]
    for step in steps:
        editor.press("Control+z")
        assert editor.value == step
    for step in [OPENING, OPENING + ghost + " ", OPENING + ghost + " - and on"]:
        editor.press("Control+Shift+Z")
        assert editor.value == step


# ---- settings, details, status, feedback, errors ----


def test_settings_are_sent_with_requests_and_survive_a_reload(editor: Editor) -> None:
    page = editor.page

    def press_on(label: str, *keys: str) -> None:
        page.get_by_label(label, exact=True).focus()
        editor.press(*keys)

    page.get_by_role("button", name="Settings").focus()
    editor.press("Enter")
    press_on("Style", "ArrowLeft", "ArrowLeft")
    press_on("Length", "Home", "ArrowRight")
    expect(page.locator("output")).to_have_text("about 5 words")
    press_on("Stop at a line break", "Space")
    expect(page.get_by_label("Temperature", exact=True)).to_be_hidden()
    page.locator("summary").focus()
    editor.press("Enter")
    expect(page.get_by_label("Temperature", exact=True)).to_have_value("0.6")
    press_on("Temperature", "Control+a", "0", ".", "6", "5")
    press_on("Model", "ArrowDown")
    press_on("Top-p", "ArrowDown")
    press_on("Top-k", "Control+a", "4", "0")
    press_on("Time limit, seconds", "2", ".", "5")
    editor.press("Escape")
    expect(page.get_by_role("heading", name="Settings")).to_be_hidden()
    editor.reload()
    expect(editor.page.locator("#slots")).to_have_text("2 of 2 slots ready")
    editor.request_suggestions()
    body = editor.requests[-1]
    expected = {
        "model_size": "slow",
        "strategy": "idea",
        "length": 6,
        "temperature": 0.65,
        "top_p": 0.79,
        "top_k": 40,
        "max_time": 2.5,
        "single_line": True,
        "context": OPENING,
        "stream": True,
    }
    assert {name: body[name] for name in expected} == expected
    assert body.keys() - expected.keys() == {"seed", "session", "sequence", "familiar_only"}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    expect(page.get_by_label("Style")).to_have_value("0.8")
    editor.press("Escape")
    editor.text.focus()
    editor.press("Alt+Enter")
    editor.wait_for_response()
    assert (editor.requests[-1]["model_size"], editor.requests[-1]["length"]) == ("embedded", 20)
    assert "max_time" not in editor.requests[-1]


def test_details_show_statistics_and_likely_tokens(editor: Editor) -> None:
    editor.request_suggestions()
    editor.press("ArrowDown")
    details = editor.page.get_by_role("region", name="Details")
    expect(details).to_be_hidden()
    editor.press("Control+i")
    expect(details).to_contain_text("score")
    expect(details).to_contain_text(re.compile(r"seed \d+"))
    ghost = editor.ghost_text
    tokens = editor.page.locator("#details .token").evaluate_all(
        "tokens => tokens.map(token => token.firstChild.textContent)"
    )
    assert re.sub(r"[\s¶]", "", ghost).startswith(re.sub(r"[\s¶␣]", "", "".join(tokens))[: len(ghost) // 2])
    assert len(tokens) >= len(ghost.split()) > 0  # no token spans two words
    assert details.locator(".alternative").count() > len(tokens)
    assert editor.value == OPENING
    editor.press("ArrowDown")  # details of another suggestion, without a further request
    expect(details).to_contain_text("score")
    assert [body.get("explain") for body in editor.requests] == [None, 3]
    editor.press("Shift+Tab")  # moves the focus to the details, so that they can be scrolled
    expect(details).to_be_focused()
    expect(editor.list).to_be_visible()
    editor.press("Tab")
    expect(editor.text).to_be_focused()
    editor.press("Control+i")
    expect(details).to_be_hidden()
    expect(editor.list).to_be_visible()


def test_the_settings_count_saved_keystrokes_and_an_undo_takes_them_back(editor: Editor) -> None:
    expect(editor.page.locator("#slots")).to_have_text("2 of 2 slots ready")
    expect(editor.status).to_contain_text("ready")
    saved = editor.page.locator("#saved")
    expect(saved).to_have_text("0 keystrokes")
    editor.request_suggestions()
    length = len(editor.ghost_text)
    editor.press("Enter")
    expect(saved).to_have_text(f"{length - 2} keystrokes")  # plus a space, minus Alt+Enter and Enter
    editor.reload()
    expect(saved).to_have_text(f"{length - 2} keystrokes")
    editor.request_suggestions(" and then")
    more = len(editor.ghost_text)
    editor.press("Enter")
    expect(saved).to_have_text(f"{length + more - 4} keystrokes")
    editor.type(" so")
    editor.press("Control+z")
    expect(saved).to_have_text(f"{length + more - 4} keystrokes")
    editor.press("Control+z")
    expect(saved).to_have_text(f"{length - 2} keystrokes")
    editor.press("Control+Shift+Z")
    expect(saved).to_have_text(f"{length + more - 4} keystrokes")


def test_feedback_reports_accepted_and_rejected_suggestions(editor: Editor) -> None:
    tercet = editor.tercet
    accepted, rejected = num_suggestions(tercet, "accepted"), num_suggestions(tercet, "rejected")
    characters = saved_characters(tercet)
    with editor.page.expect_request("**/autocomplete") as asked:
        editor.request_suggestions()
    length = len(editor.ghost_text)
    with editor.page.expect_request("**/feedback") as reported:
        editor.press("Enter")
    session = editor.requests[-1]["session"]  # in a header too: load balancers do not read bodies
    assert asked.value.headers["x-session-id"] == reported.value.headers["x-session-id"] == session
    until(lambda: num_suggestions(tercet, "accepted") == accepted + 1, PATIENCE_S, "accepted")
    assert saved_characters(tercet) == characters + length
    editor.request_suggestions()
    editor.press("Escape")
    until(lambda: num_suggestions(tercet, "rejected") == rejected + 1, PATIENCE_S, "rejected")


def test_feedback_reports_a_suggestion_accepted_while_it_was_streaming(open_page: OpenPage) -> None:
    slow_editor = open_page(mode="off", model_size="slow", temperature=0)  # one in thirty sampled ones is rejected
    page, tercet = slow_editor.page, slow_editor.tercet
    page.evaluate(HOLD)
    characters = saved_characters(tercet)
    slow_editor.type(OPENING)
    slow_editor.press("Alt+Enter")
    expect(slow_editor.ghost).not_to_be_empty()
    page.wait_for_timeout(MIN_VISIBLE_MS)
    slow_editor.press("Enter")
    expect(slow_editor.list).to_be_hidden()
    length = len(slow_editor.value) - len(OPENING)
    assert length > 0
    assert saved_characters(tercet) == characters
    page.evaluate("release()")
    until(lambda: saved_characters(tercet) == characters + length, PATIENCE_S, "the accepted characters")


def test_only_the_end_of_a_long_document_is_sent(editor: Editor) -> None:
    editor.text.focus()
    sentence = "It was a long and weary way that they had to go. "
    editor.page.keyboard.insert_text(sentence * 1000)
    starts = set()
    for word in ("And", " so", " they", " went"):
        editor.type(word)
        editor.press("Alt+Enter")
        editor.wait_for_response()
        editor.press("Escape")
        context = editor.requests[-1]["context"]
        assert editor.value.endswith(context)
        assert 8192 <= len(context) < 8192 + 4096
        starts.add(len(editor.value) - len(context))
    assert len(starts) == 1  # a common prefix, for the prefix cache


# ---- random keys ----


def test_random_keys_leave_a_working_editor(open_page: OpenPage) -> None:
    """After 150 random keys the page has logged no error, and suggestions can be requested and accepted.

    The slow model keeps a request in flight during about half of the keys.
    """
    keys = (
        "Tab Tab Tab Enter Escape ArrowUp ArrowDown ArrowRight ArrowLeft Backspace Home End Control+z Control+Shift+Z"
    )
    keys += " Control+i Control+a Delete Shift+ArrowLeft a , Space"
    rng = random.Random(5)
    editor = open_page(model_size="slow", length=12)
    editor.type(OPENING)
    for _ in range(150):
        key = rng.choice(keys.split())
        if key == "Tab" and not editor.text.evaluate("element => element === document.activeElement"):
            editor.text.focus()  # a Tab after Escape moved the focus, as intended
        editor.press(key)
        if rng.random() < 0.3:
            editor.page.wait_for_timeout(rng.choice([5, 40, 150]))
    editor.text.focus()
    editor.press("Escape", "Escape", "Control+a", "Delete")
    assert editor.value == ""
    editor.request_suggestions()
    ghost = editor.ghost_text
    editor.press("Enter")
    assert editor.value == OPENING + ghost + " "
    until(lambda: num_in_flight(editor.tercet) == 0, PATIENCE_S, "no request in flight")
