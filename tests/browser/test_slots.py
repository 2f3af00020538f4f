"""The page of slots in a real browser: live states and figures, the key, a server that goes away, accessibility."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.browser.driver import OPENING, PHONE, ObservedPage, violations
from tests.e2e.harness import Tercet

OpenSlots = Callable[..., Page]


@pytest.fixture
def open_slots(observe: Callable[..., ObservedPage]) -> OpenSlots:
    return lambda **context: observe(ObservedPage, "/slots", **context).page


def box(page: Page, name: str) -> Locator:
    """A slot's box, by its heading."""
    return page.get_by_role("list", name="Slots").get_by_role("listitem").filter(has_text=name)


def test_a_slot_serves_while_it_decodes_and_then_rests(open_slots: OpenSlots, tercet: Tercet) -> None:
    page = open_slots()
    slow = box(page, "1 · slow")
    expect(slow.locator(".state")).to_have_text("rests")
    expect(slow.locator(".memory")).to_contain_text("MB")
    thread = threading.Thread(target=tercet.ask, args=(OPENING,), kwargs={"model_size": "slow", "length": 60})
    thread.start()
    expect(slow.locator(".state")).to_have_text("serves")
    expect(slow.locator(".busy")).to_have_count(3)
    expect(box(page, "0 · embedded").locator(".state")).to_have_text("rests")
    expect(page.locator("#tokens")).to_have_text(re.compile("[1-9]"))
    expect(page.locator("#p50")).to_contain_text("ms")
    expect(page.locator("#rate")).to_have_text(re.compile("[1-9]"))
    thread.join()
    expect(slow.locator(".state")).to_have_text("rests")
    expect(slow.locator(".busy")).to_have_count(0)


def test_a_server_that_does_not_respond_is_reported_until_it_does(observe: Callable[..., ObservedPage]) -> None:
    observed = observe(ObservedPage, "/slots")
    page = observed.page
    expect(box(page, "0 · embedded")).to_be_visible()

    page.route("**/slots", lambda route: route.abort())
    expect(page.get_by_role("status")).to_have_text("The server does not respond.")
    page.unroute_all(behavior="wait")
    expect(page.get_by_role("status")).to_have_text("")
    observed.errors.clear()  # the browser logs the failed requests


@pytest.mark.parametrize("context", [{"color_scheme": "light"}, {"color_scheme": "dark", **PHONE}])
def test_a_failed_slot_says_why_and_a_loading_one_how_far_it_is(
    open_slots: OpenSlots, context: dict[str, object]
) -> None:
    """The states are the browser's: those of the test's server stay warm."""
    page = open_slots(**context)
    expect(box(page, "0 · embedded").locator(".state")).to_have_text("rests")
    found = violations(page)

    def change(route: Route) -> None:
        body = route.fetch().json()
        body["slots"][0] |= {"state": "loading", "progress": 0.5}
        body["slots"][1] |= {"state": "failed", "reason": "no such file"}
        route.fulfill(json=body)

    page.route("**/slots", change)
    expect(box(page, "0 · embedded").locator(".state")).to_have_text("loads")
    assert box(page, "0 · embedded").get_by_role("progressbar").evaluate("element => element.value") == 0.5
    expect(box(page, "1 · slow").locator(".state")).to_have_text("failed")
    expect(box(page, "1 · slow")).to_contain_text("no such file")
    assert found + violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.unroute_all(behavior="wait")


def test_a_hidden_page_does_not_ask(open_slots: OpenSlots) -> None:
    page = open_slots()
    expect(box(page, "0 · embedded")).to_be_visible()
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.wait_for_timeout(1000)  # a request that was under way
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert asked == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(500)
    assert asked


def test_a_key_is_requested_and_sent_where_the_server_requires_one(open_slots: OpenSlots) -> None:
    """The route stands for a server with keys, whose refusal `tests/gateway/api/test_slots.py` tests."""

    def require_key(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer tct_a":
            route.continue_()
        else:
            route.fulfill(status=401, json={"code": "unauthorized", "detail": "This server requires an API key."})

    page = open_slots()
    field = page.get_by_label("API key", exact=True)
    expect(box(page, "0 · embedded")).to_be_visible()
    expect(field).to_be_hidden()
    page.route("**/slots", require_key)
    expect(page.locator("#key-note")).to_have_text("This server requires an API key.")
    field.fill("tct_a")
    field.press("Enter")
    expect(page.locator("#key-note")).to_have_text("")
    expect(box(page, "0 · embedded").locator(".state")).to_have_text("rests")
    page.unroute_all(behavior="wait")
