"""The documentation page in a real browser: the vendored viewer, under the page's policy, with no other host."""

from __future__ import annotations

import json
from collections.abc import Callable

from playwright.sync_api import expect

from tests.browser.driver import OPENING, DocsPage, violations
from tests.e2e.harness import Tercet

OpenDocs = Callable[..., DocsPage]
# The rules of axe-core that Swagger UI breaks, in the list and with an operation open.
BROKEN_RULES = {
    "color-contrast",
    "heading-order",
    "label",
    "nested-interactive",
    "region",
    "scrollable-region-focusable",
    "select-name",
}


def test_every_operation_is_listed_and_one_is_tried(observe: OpenDocs, tercet: Tercet) -> None:
    """`observe` fails where the policy blocks anything, or a request leaves the server."""
    docs = observe(DocsPage, "/docs")
    document = tercet.client.get("/openapi.json").json()
    expect(docs.operations).to_have_count(sum(len(methods) for methods in document["paths"].values()))
    expect(docs.page.locator("body")).to_contain_text("Tercet completes text while it is written")
    complete = docs.operation("POST", "/autocomplete")
    complete.click()
    expect(docs.page).to_have_url(f"{tercet.url}/docs#/Completions/post_autocomplete")
    answer = docs.send(complete, 200, json.dumps({"context": OPENING, "n_samples": 2, "length": 4}))
    assert answer.count('"finish_reason"') == 2
    assert "x-request-id" in answer
    assert '"field": "context"' in docs.send(complete, 422, '{"context": 1}')
    assert "event: done" in docs.send(complete, 200, json.dumps({"context": OPENING, "length": 2, "stream": True}))
    found = {violation["id"] for violation in violations(docs.page)}
    assert found == BROKEN_RULES
