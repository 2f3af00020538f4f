"""Accessibility: ARIA roles and live region, keyboard only, a phone's width, dark and light, reduced motion; what a
newcomer reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.browser.driver import MIN_VISIBLE_MS, OPENING, PHONE, Editor, answer_with, box, violations
from tests.browser.test_editor import as_single_line
from tests.e2e.harness import PATIENCE_S, Tercet, until

OpenPage = Callable[..., Editor]


@pytest.mark.parametrize(("scheme", "width"), [("light", "wide"), ("dark", "phone")])
def test_axe_finds_no_violations(open_page: OpenPage, scheme: str, width: str) -> None:
    options = {"color_scheme": scheme, "reduced_motion": "reduce", **(PHONE if width == "phone" else {})}
    editor = open_page(mode="off", context=options)
    background = "rgb(251, 249, 244)" if scheme == "light" else "rgb(27, 26, 24)"
    expect(editor.page.locator("html")).to_have_css("background-color", background)
    found = {"empty": violations(editor.page)}
    editor.request_suggestions()
    found["open"] = violations(editor.page)
    editor.press("ArrowDown", "Control+i")
    expect(editor.page.locator("#details .token").first).to_be_visible()
    found["details"] = violations(editor.page)
    editor.press("Escape")
    for name in ("Settings", "Shortcuts") if width != "phone" else ("Settings",):  # a touch screen has no shortcuts
        editor.page.get_by_role("button", name=name, exact=True).click()
        expect(editor.page.get_by_role("heading", name=name)).to_be_visible()
        if name == "Settings":
            editor.page.locator("#settings summary").click()
        found[name] = violations(editor.page)
        editor.press("Escape")
    assert not any(found.values()), found
    editor.page.keyboard.insert_text("\n")
    editor.press("Control+Home")
    editor.page.keyboard.insert_text("A title that is longer than the header of a phone is wide, and more\n")
    documents = editor.page.locator("#documents")
    editor.page.get_by_role("button", name="Documents").click()
    expect(documents).to_be_visible()
    rules = violations(editor.page)
    assert editor.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    documents.get_by_role("button", name="Delete").click()
    expect(editor.page.get_by_role("button", name="Undo")).to_be_visible()
    rules += violations(editor.page)
    assert {rule["id"] for rule in rules} <= {"aria-allowed-role"}, rules


# CodeMirror empties its live region soon after it has spoken.
HEAR = """() => {
    window.spoken = [];
    const region = document.querySelector(".cm-announced");
    new MutationObserver(() => {
        if (region.textContent.trim()) spoken.push(region.textContent);
    }).observe(region, { childList: true, characterData: true, subtree: true });
}"""


def test_the_text_field_names_the_chosen_option(editor: Editor) -> None:
    expect(editor.text).to_have_attribute("aria-multiline", "true")
    expect(editor.text).to_have_attribute("aria-controls", "suggestions")
    expect(editor.text).to_have_attribute("writingsuggestions", "false")  # the browser's own predictions
    editor.page.evaluate(HEAR)
    rows = editor.request_suggestions()
    [spoken] = editor.page.evaluate("spoken")
    assert spoken.startswith("Suggestion 1 of 3: ")
    for row, key in ((rows[0], "ArrowDown"), (rows[1], "ArrowDown"), (rows[2], "ArrowDown"), (rows[0], "ArrowUp")):
        active = editor.text.get_attribute("aria-activedescendant")
        expect(editor.page.locator(f"#{active}")).to_have_text(row, use_inner_text=True)
        expect(editor.page.locator(f"#{active}")).to_have_attribute("aria-selected", "true")
        expect(editor.chosen).to_have_count(1)
        assert as_single_line(editor.ghost_text) in row
        editor.press(key)
    expect(editor.chosen).to_have_text(rows[2], use_inner_text=True)
    assert editor.value == OPENING  # ghost text is not part of the document
    while " " not in editor.ghost_text.strip():
        editor.press("ArrowDown")
    editor.press("ArrowRight")
    expect(editor.announcements).to_contain_text("Accepted: ")
    editor.press("Escape")
    expect(editor.announcements).to_have_text("Dismissed.")
    assert editor.text.get_attribute("aria-activedescendant") is None


def test_every_control_is_reachable_with_the_keyboard(editor: Editor) -> None:
    """Tab requests suggestions, but the text is no focus trap: Shift+Tab leaves it, and so does Escape, Tab."""
    expect(editor.text).to_be_focused()
    reached = []
    for _ in range(3):
        editor.press("Shift+Tab")
        reached.append(editor.page.evaluate("document.activeElement.textContent"))
    assert reached == ["Settings", "Shortcuts", "Focus"]
    editor.press("Tab", "Enter")
    expect(editor.page.get_by_role("heading", name="Keyboard shortcuts")).to_be_visible()
    editor.press("Escape")
    editor.text.focus()
    editor.press("Escape", "Tab")
    expect(editor.page.get_by_role("button", name="Suggest", exact=True)).to_be_focused()
    assert not editor.requests
    editor.press("Enter")
    expect(editor.text).to_be_focused()
    editor.wait_for_response()


def test_reduced_motion_stops_animations(editor: Editor) -> None:
    num_animated = (
        "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).animationName !== 'none').length"
    )
    editor.request_suggestions()
    assert editor.page.evaluate(num_animated) > 0
    editor.page.emulate_media(reduced_motion="reduce")
    assert editor.page.evaluate(num_animated) == 0


# ---- the first minute ----


def test_the_empty_page_and_the_settings_say_what_a_writer_needs(open_page: OpenPage) -> None:
    expect(open_page(context=PHONE).text).to_contain_text("A tap takes them. Nothing leaves this computer.")
    editor = open_page()
    expect(editor.text).to_contain_text("Tab takes them. Nothing leaves this computer.")
    expect(editor.page.locator("#model-line")).to_contain_text("a language model: embedded, a file of")
    expect(editor.status).to_contain_text("the model is ready")
    editor.page.get_by_role("button", name="Settings").click()
    labels = editor.page.locator("#settings label:visible").all_text_contents()
    assert labels[-2:] == ["API key", "Keep the key in this browser"]
    for name in ("style", "words"):
        expect(editor.page.locator(f"#{name}-ends")).to_contain_text("ideas")


@pytest.mark.parametrize("host", ["tercet.example", "127.0.0.1"])
def test_text_that_leaves_the_computer_is_not_said_to_stay(browser: Browser, tercet: Tercet, host: str) -> None:
    """Another host, for which the test answers, or workers on other machines."""

    def answer(route: Route) -> None:
        response = route.fetch(url=route.request.url.replace(host, "127.0.0.1"), headers={})
        if host == "tercet.example" or not route.request.url.endswith("/health/ready"):
            return route.fulfill(response=response)
        models = [model | {"source": "remote"} for model in response.json()["models"]]
        return route.fulfill(json=response.json() | {"models": models})

    with browser.new_context() as context:
        page = context.new_page()
        page.route("**", answer)
        page.goto(f"http://{host}:{tercet.port}/")
        sent = f"Your text is sent to {host}:{tercet.port} and to no other site."
        expect(page.get_by_role("textbox", name="Text")).to_contain_text(sent)
        expect(page.locator("body")).not_to_contain_text("leaves this computer")
        page.unroute_all(behavior="wait")  # else an answer under way fails once the page is closed


def test_the_first_three_ghost_texts_name_their_key(open_page: OpenPage) -> None:
    def hint(editor: Editor, number: int) -> str:
        answer_with(editor.page, f" number {number}")
        editor.type("It is")
        until(lambda: editor.ghost_text, PATIENCE_S, "ghost text")
        editor.page.wait_for_timeout(MIN_VISIBLE_MS)
        assert number or violations(editor.page) == []
        content = str(editor.ghost.evaluate("ghost => getComputedStyle(ghost, '::after').content"))
        editor.press("Control+a", "Delete")
        return content

    editor = open_page(mode="eager")
    shown = [hint(editor, number) for number in range(2)]
    editor.reload()
    assert [*shown, *(hint(editor, number) for number in range(3))] == ['"Tab"'] * 3 + ["none"] * 2
    assert hint(open_page(mode="eager", context=PHONE), 0) == "none"


def test_what_narrow_windows_and_the_find_panel_show(editor: Editor) -> None:
    editor.type("One")
    expect(editor.status).to_contain_text("1 word")
    for width in (1100, 200):
        editor.page.set_viewport_size({"width": width, "height": 400})
        left, *separators = editor.status.evaluate(
            """(status) => [status, ...status.children].filter((each) => each.offsetWidth).map((each) =>
                each.getBoundingClientRect().left + (parseFloat(getComputedStyle(each, "::before").left) || 0))"""
        )
        expect(editor.status).to_have_css("overflow-x", "clip")  # what is left of it is not drawn
        assert [separator < left for separator in separators] == [True, width == 200]
    editor.page.set_viewport_size({"width": 320, "height": 256})  # 400 % of 1280
    assert editor.page.locator("#current-document span").evaluate("name => name.offsetWidth") >= 20  # "One"
    editor.page.set_viewport_size({"width": 1100, "height": 400})
    editor.press("Control+f")
    boxes = [box(each) for each in editor.page.locator(".cm-search label, .cm-search [name=close]").all()]
    assert all(each["x"] + each["width"] <= (1100 + 576) / 2 for each in boxes)  # in the column
    assert len({(each["y"], each["height"]) for each in boxes[:3]}) == 1  # "by word" too is on the first line
