"""For everybody: a screen reader's words, keys alone, a phone's width, dark and light, no motion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.browser.driver import OPENING, Editor

OpenPage = Callable[..., Editor]
PHONE = {"viewport": {"width": 360, "height": 720}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def violations(editor: Editor) -> list[dict[str, Any]]:
    found = Axe().run(editor.page).response["violations"]
    return [
        {"id": one["id"], "impact": one["impact"], "where": [node["html"][:200] for node in one["nodes"]]}
        for one in found
    ]


@pytest.mark.parametrize(("scheme", "width"), [("light", "wide"), ("dark", "phone")])
def test_axe_finds_nothing(open_page: OpenPage, scheme: str, width: str) -> None:
    options = {"color_scheme": scheme, "reduced_motion": "reduce", **(PHONE if width == "phone" else {})}
    editor = open_page(pauses=False, context=options)
    found = {"empty": violations(editor)}
    editor.ask()
    found["open"] = violations(editor)
    editor.press("ArrowDown", "Control+i")
    expect(editor.page.locator("#details .token").first).to_be_visible()
    found["details"] = violations(editor)
    editor.press("Escape")
    for name in ("Settings", "Keys"):
        editor.page.get_by_role("button", name=name, exact=True).click()
        expect(editor.page.get_by_role("heading", name=name)).to_be_visible()
        found[name] = violations(editor)
        editor.press("Escape")
    # HTML has no combobox of several lines, so a textarea is not "allowed" to be one; screen readers read it well.
    others = [one for state in found.values() for one in state if one["id"] != "aria-allowed-role"]
    assert not others, found


def test_a_combobox_with_a_listbox(editor: Editor) -> None:
    expect(editor.text).to_have_attribute("aria-expanded", "false")
    expect(editor.text).to_have_attribute("aria-controls", "suggestions")
    rows = editor.ask()
    expect(editor.text).to_have_attribute("aria-expanded", "true")
    expect(editor.news).to_contain_text("3 suggestions: ")
    for row in (rows[0], rows[1]):
        active = editor.text.get_attribute("aria-activedescendant")
        expect(editor.page.locator(f"#{active}")).to_have_text(row, use_inner_text=True)
        expect(editor.page.locator(f"#{active}")).to_have_attribute("aria-selected", "true")
        expect(editor.chosen).to_have_count(1)
        editor.press("ArrowDown")
    editor.press("ArrowRight")
    expect(editor.news).to_contain_text("Taken: ")
    editor.press("Escape")
    expect(editor.news).to_have_text("Dismissed.")
    expect(editor.text).to_have_attribute("aria-expanded", "false")
    assert editor.text.get_attribute("aria-activedescendant") is None


def test_suggestions_that_came_by_themselves_do_not_speak_over_the_typing(open_page: OpenPage) -> None:
    editor = open_page()
    editor.write(OPENING)
    editor.wait_until_whole()
    assert editor.text.get_attribute("aria-activedescendant") is None
    editor.press("ArrowDown")
    assert editor.text.get_attribute("aria-activedescendant") is not None


def test_every_control_by_keys_alone(editor: Editor) -> None:
    """Tab is the text's own, but it is no trap: backwards it leads out, and so does Escape before it."""
    expect(editor.text).to_be_focused()
    reached = []
    for _ in range(3):
        editor.press("Shift+Tab")
        reached.append(editor.page.evaluate("document.activeElement.textContent"))
    assert reached == ["Clear", "Settings", "Keys"]
    editor.press("Enter")
    expect(editor.page.get_by_role("heading", name="Keys")).to_be_visible()
    editor.press("Escape")
    editor.text.focus()
    editor.press("Escape", "Tab")
    expect(editor.page.get_by_role("button", name="Suggest", exact=True)).to_be_focused()
    assert not editor.asked
    editor.press("Enter")
    expect(editor.text).to_be_focused()
    editor.wait_until_whole()


def test_a_phone(open_page: OpenPage) -> None:
    editor = open_page(pauses=False, context=PHONE)
    page = editor.page
    page.get_by_role("combobox").tap()
    page.keyboard.insert_text((OPENING + " said nothing. ") * 6 + OPENING)
    before = editor.value
    page.get_by_role("button", name="Suggest", exact=True).tap()
    rows = editor.wait_until_whole()
    assert len(rows) == 3
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for element in [editor.list, *page.locator("#panel-actions button").all()]:
        box = element.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 720
        assert box["height"] >= 24  # WCAG 2.5.8
    page.get_by_role("button", name="one word").tap()
    assert len(editor.value) > len(before)
    editor.options.first.tap()
    assert editor.value.startswith(before)
    expect(editor.list).to_be_hidden()
    page.get_by_role("button", name="Settings").tap()
    sheet = page.get_by_role("form", name="Settings").bounding_box()
    assert sheet is not None
    assert sheet["x"] >= 0
    assert sheet["x"] + sheet["width"] <= 360


def test_dark_and_light_are_two(open_page: OpenPage) -> None:
    grounds = [
        open_page(context={"color_scheme": scheme}).page.evaluate(
            "getComputedStyle(document.documentElement).backgroundColor"
        )
        for scheme in ("light", "dark")
    ]
    assert grounds[0] != grounds[1]


def test_nothing_moves_where_motion_is_unwanted(editor: Editor) -> None:
    moving = "[...document.querySelectorAll('*')].filter(one => getComputedStyle(one).animationName !== 'none').length"
    editor.ask()
    assert editor.page.evaluate(moving) > 0
    editor.page.emulate_media(reduced_motion="reduce")
    assert editor.page.evaluate(moving) == 0
