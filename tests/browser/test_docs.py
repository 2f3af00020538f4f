"""The documentation page in a real browser: search, keyboard, requests to the real server, no other host."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.driver import OPENING, PHONE, DocsPage, violations
from tests.e2e.harness import Tercet

OpenDocs = Callable[..., DocsPage]


@pytest.fixture
def open_docs(observe: OpenDocs) -> OpenDocs:
    def open_new(fragment: str = "", **options: Any) -> DocsPage:
        docs = observe(DocsPage, f"/docs{fragment}", **options)
        expect(docs.found).to_contain_text("operation")
        return docs

    return open_new


def test_an_operation_is_found_opened_and_tried_with_the_keyboard(open_docs: OpenDocs, tercet: Tercet) -> None:
    docs = open_docs()
    press = docs.page.keyboard.press
    paths = tercet.client.get("/openapi.json").json()["paths"]
    expect(docs.found).to_have_text(f"{sum(len(methods) for methods in paths.values())} operations")
    press("/")
    expect(docs.search).to_be_focused()
    docs.page.keyboard.type("autocomplete nothing-is-called-this")
    expect(docs.found).to_have_text("0 operations")
    expect(docs.page.get_by_role("heading", level=2)).to_have_count(0)
    press("Control+a")
    docs.page.keyboard.type("/autocomplete single_line")
    expect(docs.found).to_have_text("1 operation")
    press("Tab")
    expect(docs.summary("POST", "/autocomplete")).to_be_focused()
    press("Enter")
    expect(docs.page).to_have_url(f"{tercet.url}/docs#post_autocomplete")
    expect(docs.page.get_by_label("API key", exact=True)).to_be_hidden()
    docs.body.focus()
    press("Control+a")
    docs.page.keyboard.insert_text(json.dumps({"context": OPENING, "n_samples": 2, "length": 4}))
    press("Tab")
    expect(docs.page.get_by_role("button", name="Send")).to_be_focused()
    press("Enter")
    expect(docs.status).to_contain_text("200 OK in ")
    assert len(json.loads(docs.answer.text_content() or "")["sentences"]) == 2
    expect(docs.page.locator(".try .note")).to_contain_text("x-request-id: ")


def test_the_page_begins_with_what_tercet_is(open_docs: OpenDocs) -> None:
    expect(open_docs().page.locator("#about")).to_contain_text("Tercet completes text while it is written")


def test_every_field_of_the_document_is_shown(open_docs: OpenDocs, tercet: Tercet) -> None:
    docs = open_docs("#post_autocomplete")
    schema = tercet.client.get("/openapi.json").json()["components"]["schemas"]["AutocompleteRequest"]
    shown = docs.page.locator("#post_autocomplete .operation > .schema > .fields > li > code").all_inner_texts()
    assert shown == list(schema["properties"])
    name = docs.page.get_by_text("temperature", exact=True)
    field = docs.page.locator("#post_autocomplete .operation > .schema > .fields > li").filter(has=name)
    expect(field).to_contain_text("number or null default 1")
    expect(field).to_contain_text("a number from 0 to 5")


def test_errors_and_streams_are_shown_as_they_arrive(open_docs: OpenDocs) -> None:
    docs = open_docs("#post_autocomplete")
    docs.body.fill('{"context": 1}')
    assert json.loads(docs.send(422))["errors"][0]["field"] == "context"
    docs.body.fill("{")
    assert json.loads(docs.send(400))["code"] == "invalid_json"
    docs.page.get_by_label("Example").select_option(label="a line, streamed")
    assert "event: token" in docs.send(200)
    expect(docs.answer).to_contain_text("event: done")


def test_a_parameter_of_the_path_is_sent(open_docs: OpenDocs) -> None:
    docs = open_docs("#get_static_name")
    assert "export { Completer, MIN_PROBABILITIES }" in docs.send(200)
    docs.page.get_by_label("name", exact=True).fill("a/../b?c")
    assert json.loads(docs.send(404))["code"] == "not_found"


@pytest.mark.parametrize(("scheme", "options"), [("light", {}), ("dark", PHONE)])
def test_axe_finds_no_violations(open_docs: OpenDocs, scheme: str, options: dict[str, Any]) -> None:
    docs = open_docs(color_scheme=scheme, **options)
    found = {"list": violations(docs.page)}
    docs.summary("POST", "/autocomplete").click()
    docs.send(200)
    docs.page.locator("summary.answer").filter(has_text="200").click()
    found["open"] = violations(docs.page)
    assert not any(found.values()), found
    assert docs.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
