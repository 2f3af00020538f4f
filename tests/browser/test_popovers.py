"""Popovers of the page: however one is opened and closed, the focus returns to the text, and the caret stays."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.driver import PHONE, Editor
from tests.browser.test_phone import centre, touch

TEXT = "One two three"
EMPTY_PLACE = (3, 3)  # in the header's margin


@pytest.fixture(params=["mouse", "keyboard", "touch"])
def pointer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def editor(open_page: Callable[..., Editor], pointer: str) -> Editor:
    editor = open_page(mode="off", context=PHONE if pointer == "touch" else {})
    editor.type(TEXT)
    editor.press(*["ArrowLeft"] * len(" three"))
    return editor


def press_finger(editor: Editor, x: float, y: float) -> None:
    """A tap takes as long as a finger does: the page's tasks run before it ends."""
    session = editor.page.context.new_cdp_session(editor.page)
    touch(session, "touchStart", x, y)
    editor.page.wait_for_timeout(100)
    touch(session, "touchEnd")


def activate(editor: Editor, pointer: str, button: Locator) -> None:
    if pointer == "touch":
        press_finger(editor, *centre(button))
    elif pointer == "mouse":
        button.click(delay=100)
    else:
        button.focus()
        editor.press("Enter")


def click_empty_place(editor: Editor, pointer: str) -> None:
    if pointer == "touch":
        press_finger(editor, *EMPTY_PLACE)
    else:
        editor.page.mouse.click(*EMPTY_PLACE, delay=100)


def assert_keys_arrive(editor: Editor) -> None:
    """The next key is typed where the caret was; leaves the text as it was."""
    editor.press("x")
    assert (editor.value, editor.caret) == ("One twox three", len("One twox"))
    editor.press("Backspace")


CLOSES = ("Escape", "Escape inside", "its button", "an empty place", "an empty place, from inside")


def test_the_next_keys_go_to_the_text(editor: Editor, pointer: str) -> None:
    popovers = ("documents", "settings", *(["shortcuts"] if pointer != "touch" else []))  # none on a touch screen
    for popover, close in product(popovers, CLOSES):
        button = editor.page.locator(f"[popovertarget={popover}]")
        opened = editor.page.locator(f"#{popover}")
        activate(editor, pointer, button)
        expect(opened).to_be_visible()
        if "inside" in close:
            opened.locator("select, input, button, :scope[tabindex]").first.focus()
        if close.startswith("Escape"):
            editor.press("Escape")
        elif close == "its button":
            activate(editor, pointer, button)
        else:
            click_empty_place(editor, pointer)
        expect(opened).to_be_hidden()
        expect(editor.text, f"{popover}, {close}").to_be_focused()
        assert_keys_arrive(editor)
    click_empty_place(editor, pointer)  # a click that closes nothing puts the text aside, as on any page
    expect(editor.text).not_to_be_focused()


@pytest.mark.parametrize("pointer", ["mouse", "touch"], indirect=True)
def test_another_control_keeps_the_focus_that_closes_a_popover(editor: Editor, pointer: str) -> None:
    documents, settings = editor.page.locator("#documents"), editor.page.locator("#settings")
    activate(editor, pointer, editor.page.get_by_role("button", name="Settings", exact=True))
    expect(settings).to_be_visible()
    button = editor.page.get_by_role("button", name="Documents")
    activate(editor, pointer, button)
    expect(settings).to_be_hidden()
    expect(documents).to_be_visible()
    expect(button).to_be_focused()
    activate(editor, pointer, editor.page.get_by_role("button", name="Find", exact=True))
    expect(documents).to_be_hidden()
    expect(editor.page.get_by_role("textbox", name="Find")).to_be_focused()
    editor.press("Escape")
    expect(editor.text).to_be_focused()
    assert_keys_arrive(editor)


@pytest.mark.parametrize("pointer", ["touch"], indirect=True)
def test_no_keyboard_opens_on_a_touch_screen_that_had_none(editor: Editor, pointer: str) -> None:
    click_empty_place(editor, pointer)
    expect(editor.text).not_to_be_focused()
    button = editor.page.get_by_role("button", name="Settings", exact=True)
    for close in ("its button", "an empty place"):
        activate(editor, pointer, button)
        expect(editor.page.locator("#settings")).to_be_visible()
        activate(editor, pointer, button) if close == "its button" else click_empty_place(editor, pointer)
        expect(editor.page.locator("#settings")).to_be_hidden()
        expect(editor.text).not_to_be_focused()


@pytest.mark.parametrize("pointer", ["mouse", "keyboard"], indirect=True)
def test_the_focus_returns_from_the_undo_button_of_a_notice(editor: Editor, pointer: str) -> None:
    page = editor.page
    page.get_by_role("button", name="Documents").click()
    page.get_by_role("button", name="New document").click()
    editor.type("Four five six")
    editor.press(*["ArrowLeft"] * len(" six"))
    page.get_by_role("button", name="Documents").click()
    page.get_by_role("button", name=f"Delete {TEXT}").click()
    activate(editor, pointer, page.get_by_role("button", name="Undo"))
    expect(page.locator("#notice")).to_be_hidden()
    editor.press("x")
    assert editor.value == "Four fivex six"
