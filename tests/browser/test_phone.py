"""The page on a touch screen: the strip of suggestions above the keyboard, taps, a long press, compositions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import CDPSession, Locator, expect

from tests.browser.driver import MIN_VISIBLE_MS, OPENING, PHONE, SURE, Editor, InputMethod, answer_with, box, violations
from tests.e2e.harness import PATIENCE_S, until


@pytest.fixture
def phone(open_page: Callable[..., Editor]) -> Editor:
    editor = open_page(mode="eager", context={**PHONE, "viewport": {"width": 360, "height": 420}})
    editor.text.tap()
    return editor


def wait_until_shown(editor: Editor) -> Locator:
    """Wait until the first chip can be tapped; returns it."""
    expect(editor.options.first).to_be_visible()
    editor.page.wait_for_timeout(MIN_VISIBLE_MS)
    return editor.options.first


def centre(element: Locator) -> tuple[float, float]:
    place = box(element)
    return place["x"] + place["width"] / 2, place["y"] + place["height"] / 2


def touch(session: CDPSession, kind: str, *point: float) -> None:
    points = [dict(zip("xy", point, strict=True))] if point else []
    session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})


def test_chips_stand_above_the_status_line_and_a_tap_accepts(phone: Editor) -> None:
    phone.type(f"{SURE} said nothing. " * 4 + SURE)
    until(lambda: phone.ghost_text, PATIENCE_S, "ghost text")
    position = "[scrollY, document.querySelector('.tercet-ghost').getBoundingClientRect().top]"
    scrolled = phone.page.evaluate(position)
    chip = wait_until_shown(phone)
    assert phone.page.evaluate(position) == scrolled  # opening the strip moves nothing
    strip, footer = box(phone.page.locator("#panel")), box(phone.page.locator("footer"))
    line = phone.ghost.first.evaluate("ghost => ghost.getClientRects()[0].toJSON()")
    assert strip["y"] + strip["height"] <= footer["y"] + 1
    assert footer["y"] + footer["height"] <= 420
    assert line["y"] + line["height"] <= strip["y"]  # nothing is hidden below the strip
    assert min(box(option)["height"] for option in phone.options.all()) >= 44
    before = phone.value
    ghost = phone.ghost_text
    chip.tap()
    until(lambda: phone.value == f"{before}{ghost} ", PATIENCE_S, "the chip's text")
    expect(phone.text).to_be_focused()
    assert abs(phone.page.evaluate("scrollY") - scrolled[0]) <= 70  # at most two lines, which were inserted


def test_a_long_press_and_a_swipe_show_the_whole_and_do_nothing_when_the_finger_lifts(
    open_page: Callable[..., Editor],
) -> None:
    """The strip becomes taller, so that something else is under the finger: Accept, Dismiss, or the text."""
    editor = open_page(mode="off", context={**PHONE, "viewport": {"width": 390, "height": 844}})
    editor.text.tap()
    editor.type(OPENING)
    session = editor.page.context.new_cdp_session(editor.page)
    still, drift, far, down, up = (0, 0), (4, -4), (-60, -300), (0, 60), (0, -60)
    gestures = ((0, 450, still), (1, 900, drift), (2, 2000, still), (1, 500, far), (0, 450, down), (0, 0, up))
    for place, hold_ms, way in gestures:
        editor.page.get_by_role("button", name="Suggest", exact=True).tap()
        rows = editor.wait_for_response()
        chip = editor.options.nth(place)
        assert chip.evaluate("chip => getComputedStyle(chip).whiteSpace") == "nowrap" or not place
        x, y = centre(chip)
        touch(session, "touchStart", x, y)
        editor.page.wait_for_timeout(hold_ms)
        for step in range(10) if any(way) else ():
            touch(session, "touchMove", x + step / 9 * way[0], y + step / 9 * way[1])
            editor.page.wait_for_timeout(16)  # Chromium makes no click of the tap that follows a fling
        editor.page.wait_for_timeout(100)
        touch(session, "touchEnd")
        expect(editor.list).to_have_class("is-expanded")
        editor.page.wait_for_timeout(100)  # the browser sends its clicks after the touch
        assert (editor.value, editor.suggestions) == (OPENING, rows)
        assert chip.evaluate("chip => chip.scrollWidth <= chip.clientWidth")
        expect(editor.text).to_be_focused()
    words = (chip.locator("span").last.text_content() or "").replace("¶", "").split()
    chip.tap()
    until(lambda: editor.value != OPENING, PATIENCE_S, "the chip's text")
    assert editor.value.removeprefix(OPENING).split() == words


def test_the_first_chip_is_twice_as_wide_and_has_two_lines(phone: Editor) -> None:
    answer_with(phone.page, " and he thought of all that he had", " saw", " said")
    phone.type(SURE)
    wait_until_shown(phone)
    first, *others = [box(option)["width"] for option in phone.options.all()]
    assert len(others) == 2
    assert first >= 1.95 * max(others)
    assert phone.options.first.locator("span").last.evaluate("span => span.getClientRects().length") == 2


@pytest.mark.parametrize("keyboard", ["resizes the page", "covers the page"])
def test_the_status_line_yields_to_the_keyboard(open_page: Callable[..., Editor], keyboard: str) -> None:
    editor = open_page(mode="eager", context={**PHONE, "viewport": {"width": 390, "height": 844}})
    page, suggest = editor.page, editor.page.get_by_role("button", name="Suggest", exact=True)
    editor.type(SURE)
    wait_until_shown(editor)
    expect(editor.status).to_be_visible()
    if keyboard == "covers the page":
        page.evaluate("Object.defineProperty(visualViewport, 'height', { get: () => 510 })")
        page.evaluate("visualViewport.dispatchEvent(new Event('resize'))")
    else:
        page.set_viewport_size({"width": 390, "height": 510})
    expect(editor.status).to_be_hidden()
    strip, button = box(page.locator("#panel")), box(suggest)
    assert strip["y"] + strip["height"] == pytest.approx(510, abs=1)  # nothing is between it and the keyboard
    assert button["y"] + button["height"] <= 510
    assert strip["x"] + strip["width"] <= button["x"]
    assert violations(page) == []
    suggest.tap()
    editor.wait_for_response()
    page.route("**/autocomplete", lambda route: route.abort())
    suggest.tap()
    expect(editor.status).to_contain_text("Your text is safe in this browser.")
    expect(editor.status).to_be_visible()
    editor.errors.clear()  # the browser logs the failed connection


SMALL = """() => Array.from(document.querySelectorAll("button, select, summary, label, a, input:not([type=checkbox])"))
  .filter((element) => element.checkVisibility() && element.offsetWidth > 1)
  .map((element) => [element.textContent || element.id, element.offsetWidth, element.offsetHeight])
  .filter(([, width, height]) => width < 44 || height < 44)"""
# Of each open popover, whether it is inside the window.
INSIDE = """() => Array.from(document.querySelectorAll(":popover-open"), (popover) => popover.getBoundingClientRect())
  .map(({ left, right }) => left >= 0 && right <= innerWidth)"""


def test_what_is_tapped_is_large_enough(phone: Editor) -> None:
    """A checkbox has a label beside it, which counts."""
    phone.type(SURE)
    wait_until_shown(phone)
    for name in ("#find", "[popovertarget=documents]", "[popovertarget=settings]"):
        phone.page.locator(name).tap()
        phone.page.locator(".cm-search, .popover:popover-open").last.wait_for()
        assert phone.page.evaluate(SMALL) == [], name
        assert all(phone.page.evaluate(INSIDE)), name


@pytest.mark.parametrize("composed", ["", "drip"])
def test_a_tap_on_ghost_text_accepts_it(phone: Editor, composed: str) -> None:
    answer_with(phone.page, "ping since Monday")
    phone.type("It is " if composed else "It is drip")
    input_method = InputMethod(phone.page)
    if composed:
        input_method.compose(composed)
    until(lambda: phone.value == "It is drip" and phone.ghost_text == "ping since Monday", PATIENCE_S, "ghost text")
    phone.page.wait_for_timeout(MIN_VISIBLE_MS)
    touch(input_method.session, "touchStart", *centre(phone.ghost))
    touch(input_method.session, "touchEnd")
    until(lambda: phone.value == "It is dripping since Monday ", PATIENCE_S, "the ghost text")
    expect(phone.text).to_be_focused()
