"""The page of slots in a real browser: live states and figures, the key, a server that goes away, accessibility."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from shared.keys import new_key
from tests.browser.driver import OPENING, PHONE, ObservedPage, violations
from tests.e2e.harness import Tercet, running

OpenSlots = Callable[..., Page]


@pytest.fixture
def open_slots(browser: Browser, tercet: Tercet) -> Iterator[OpenSlots]:
    """Opens the page; teardown fails if it logged an error or sent a request to another host."""
    opened: list[ObservedPage] = []

    def open_new(server: Tercet = tercet, **context: object) -> Page:
        options = {"viewport": {"width": 1100, "height": 760}, **context}
        observed = ObservedPage(browser.new_context(**options).new_page(), server)  # type: ignore[arg-type]
        opened.append(observed)
        observed.page.goto(f"{server.url}/slots")
        return observed.page

    yield open_new
    for observed in opened:
        observed.page.context.close()
        assert not observed.errors


def box(page: Page, name: str) -> Locator:
    """A slot's box, by its heading."""
    return page.get_by_role("list", name="Slots").get_by_role("listitem").filter(has_text=name)


def figure(page: Page, name: str) -> Locator:
    return page.locator(f"#{name}")


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
    expect(figure(page, "tokens")).not_to_have_text("0.0")
    expect(figure(page, "p50")).to_contain_text("ms")
    expect(figure(page, "rate")).not_to_have_text("0.0")
    thread.join()
    expect(slow.locator(".state")).to_have_text("rests")
    expect(slow.locator(".busy")).to_have_count(0)


def test_a_server_that_does_not_respond_is_reported_until_it_does(open_slots: OpenSlots) -> None:
    page = open_slots()
    expect(box(page, "0 · embedded")).to_be_visible()

    def fail(route: Route) -> None:
        route.abort()

    page.route("**/slots", fail)
    expect(page.get_by_role("status")).to_have_text("The server does not respond.")
    page.unroute("**/slots", fail)
    expect(page.get_by_role("status")).to_have_text("")


def test_a_failed_slot_says_why_and_a_loading_one_how_far_it_is(open_slots: OpenSlots) -> None:
    """The states are the browser's: those of the test's server stay warm."""
    page = open_slots()

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
    assert violations(page) == []
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


def test_a_server_with_keys_shows_its_slots_with_a_key(
    open_slots: OpenSlots, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base: Path = tmp_path_factory.mktemp("t")
    key, _ = new_key(base / "keys", "test", None, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERCET_API_KEY", key)
        with running(base, keys=str(base / "keys")) as server:
            server.environ["TERCET_API_KEY"] = key
            page = open_slots(server)
            field = page.get_by_label("API key", exact=True)
            expect(page.locator("#key-note")).to_contain_text("requires an API key")
            expect(page.get_by_role("listitem")).to_have_count(0)
            field.fill(key)
            field.press("Enter")
            expect(box(page, "0 · embedded").locator(".state")).to_have_text("rests")


@pytest.mark.parametrize(("scheme", "options"), [("light", {}), ("dark", PHONE)])
def test_axe_finds_no_violations(open_slots: OpenSlots, scheme: str, options: dict[str, object]) -> None:
    page = open_slots(color_scheme=scheme, **options)
    expect(box(page, "0 · embedded")).to_be_visible()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_dark_and_light_schemes_differ(open_slots: OpenSlots) -> None:
    script = "getComputedStyle(document.documentElement).backgroundColor"
    assert len({open_slots(color_scheme=scheme).evaluate(script) for scheme in ("light", "dark")}) == 2
