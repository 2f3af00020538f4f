"""API keys in a real browser: the page with its field for the key, and pages of listed and other origins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.browser.driver import OPENING, PHONE, DocsPage, Editor, StaticSite, static_site
from tests.e2e.harness import Tercet, running

# The same request as any page may try it, without the client module; "no-cors" needs no preflight.
FETCH = """async ([url, mode, headers]) => {
    const body = JSON.stringify({ context: "The sea", length: 4 });
    try {
        const response = await fetch(url + "/autocomplete", { method: "POST", mode, headers, body });
        return { type: response.type, status: response.status };
    } catch (error) {
        return { name: error.constructor.name };
    }
}"""


@pytest.fixture(scope="module")
def tercet(
    browser: Browser, site: StaticSite, tmp_path_factory: pytest.TempPathFactory, key_path: Path, key: str
) -> Iterator[Tercet]:
    """An instance that requires keys and lists the site's origin."""
    with running(tmp_path_factory.mktemp("t"), keys=str(key_path), api_key=key, origins=site.origin) as instance:
        yield instance


def key_input(page: Page) -> Locator:
    return page.get_by_label("API key", exact=True)


def enter_key(editor: Editor, key: str, *, is_kept: bool = False) -> None:
    """Enter a key as a writer does who was offered the field."""
    editor.page.get_by_role("button", name="Enter API key").click()
    expect(key_input(editor.page)).to_be_focused()
    if is_kept:
        editor.page.get_by_label("Keep the key in this browser").check()
        key_input(editor.page).focus()
    editor.page.keyboard.insert_text(key)
    editor.press("Enter")


def stored(page: Page) -> tuple[str | None, str | None]:
    """The key in the storage of the tab, and of the browser."""
    found: list[str | None] = page.evaluate(
        "[sessionStorage.getItem('tercet.key'), localStorage.getItem('tercet.key')].map(JSON.parse)"
    )
    return found[0], found[1]


def test_a_missing_and_a_wrong_key_are_named_and_the_right_one_brings_suggestions(
    open_page: Callable[..., Editor], key: str
) -> None:
    editor = open_page(mode="off")
    page = editor.page
    offer = page.get_by_role("button", name="Enter API key")
    expect(offer).to_be_hidden()
    editor.type(OPENING)
    editor.press("Alt+Enter")
    expect(editor.status).to_contain_text("This server requires an API key.")
    expect(editor.announcements).to_have_text("This server requires an API key.")
    expect(editor.text).to_be_focused()
    enter_key(editor, "tct_wrong")
    expect(editor.status).to_contain_text("The server rejected this API key.")
    expect(editor.text).to_be_focused()
    offer.click()
    expect(page.locator("#key-note")).to_have_text("The server rejected this API key.")
    expect(key_input(page)).to_have_attribute("aria-invalid", "true")
    expect(key_input(page)).to_have_attribute("type", "password")
    editor.press("Escape")
    enter_key(editor, key)
    assert len(editor.wait_for_response()) == 3
    expect(editor.text).to_be_focused()
    expect(offer).to_be_hidden()
    expect(key_input(page)).to_be_hidden()
    assert editor.value == OPENING
    assert key not in str(editor.requests)


def test_the_key_is_kept_as_long_as_the_writer_chooses(open_page: Callable[..., Editor], key: str) -> None:
    editor = open_page(mode="off")
    page = editor.page
    editor.type(OPENING)
    editor.press("Alt+Enter")
    enter_key(editor, key)
    editor.wait_for_response()
    assert stored(page) == (key, None)
    editor.reload()
    assert len(editor.request_suggestions(" then")) == 3
    other_tab = Editor(page.context.new_page(), editor.tercet)
    other_tab.page.goto(editor.tercet.url)
    other_tab.wait_until_ready()
    other_tab.press("Alt+Enter")
    expect(other_tab.status).to_contain_text("This server requires an API key.")
    enter_key(other_tab, key, is_kept=True)
    other_tab.wait_for_response()
    assert stored(other_tab.page) == (None, key)
    third_tab = Editor(page.context.new_page(), editor.tercet)
    third_tab.page.goto(editor.tercet.url)
    third_tab.wait_until_ready()
    assert len(third_tab.request_suggestions(" and")) == 3
    # Reset restores the settings; the key is none of them. Emptying the field removes it.
    page = third_tab.page
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    expect(key_input(page)).to_have_value(key)
    assert key not in page.evaluate("localStorage.getItem('tercet.settings')")
    key_input(page).fill("")
    key_input(page).blur()
    assert stored(page) == (None, None)


def test_the_documentation_sends_a_key_where_an_operation_needs_it(
    observe: Callable[..., DocsPage], tercet: Tercet, key: str
) -> None:
    """The key that is entered in the viewer, or the one that the editor keeps."""
    docs = observe(DocsPage, "/docs", color_scheme="dark", **PHONE)
    page = docs.page
    sent: list[tuple[str, str | None]] = []
    page.on("request", lambda request: sent.append((request.url, request.headers.get("authorization"))))
    complete = docs.operation("POST", "/autocomplete")
    complete.click()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(28, 32, 34)"
    body = '{"context": "The sea", "length": 4}'
    assert "requires an API key" in docs.send(complete, 401, body)
    page.get_by_role("button", name="Authorize").click()
    page.get_by_label("auth-bearer-value").fill(key)
    page.get_by_label("Apply credentials").first.click()
    page.get_by_role("button", name="Close").first.click()
    assert "sentences" in docs.send(complete, 200, body)
    live = docs.operation("GET", "/health/live")
    live.click()
    assert '"live"' in docs.send(live, 200)
    page.evaluate("key => sessionStorage.setItem('tercet.key', JSON.stringify(key))", key)
    page.goto(f"{tercet.url}/docs")
    complete.click()
    assert "sentences" in docs.send(complete, 200, body)
    completions = [authorization for url, authorization in sent if url.endswith("/autocomplete")]
    assert completions == [None, f"Bearer {key}", f"Bearer {key}"]
    assert (f"{tercet.url}/health/live", None) in sent


def test_a_page_of_another_origin_gets_nothing_even_with_a_key(
    page: Page, tmp_path: Path, tercet: Tercet, key: str
) -> None:
    (tmp_path / "empty.html").write_text("<!doctype html><title>Notes</title>")
    with static_site(tmp_path) as other_site:
        page.goto(f"{other_site.origin}/empty.html")
        assert page.evaluate(FETCH, [tercet.url, "cors", {"x-api-key": key}]) == {"name": "TypeError"}
        # The browser sends this request without asking, and shows the page nothing of the response.
        assert page.evaluate(FETCH, [tercet.url, "no-cors", {}]) == {"type": "opaque", "status": 0}
    refused = [event for event in tercet.events("request_finished") if event["status"] == 403]
    assert {event["method"] for event in refused} >= {"POST", "OPTIONS"}
    assert not any(event.get("key") for event in refused)
