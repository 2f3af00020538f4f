"""`/slots` in process: the JSON, the choice of the page, and which of them needs a key."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from gateway.api.page import STATIC
from gateway.api.slots import ROUTES
from gateway.server.served_app import Work
from shared.api_keys import new_key
from tests.e2e.harness import ROOT
from tests.gateway.conftest import WARM, Gateway, MakeGateway
from tests.gateway.pool.reservations import claim

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_the_json_has_all_that_is_known_of_each_slot(gateway: Gateway) -> None:
    gateway.admission.update(1, WARM)
    first, second, third = gateway.client.simulate_get("/slots").json["slots"]
    of_plan = {"slot": 1, "model": "small", "device": "cpu", "address": "", "peak_in_flight": 0}
    assert second == msgspec.to_builtins(WARM) | of_plan
    assert [(slot["slot"], slot["model"], slot["state"]) for slot in (first, third)] == [
        (0, "small", "down"),
        (2, "medium", "down"),
    ]


def test_a_peak_is_shown_until_two_states_later(gateway: Gateway) -> None:
    def peak() -> int:
        return int(gateway.client.simulate_get("/slots").json["slots"][2]["peak_in_flight"])

    gateway.admission.update(2, WARM)
    own = claim("medium")
    slots = gateway.admission.reserve(own, 2)
    assert peak() == 2
    for slot in slots:
        gateway.admission.release(slot, own)
    gateway.admission.update(2, WARM)
    assert peak() == 2
    gateway.admission.update(2, WARM)
    assert peak() == 0


def test_answers_are_those_of_completions(gateway: Gateway) -> None:
    for route, seconds in (("/autocomplete", 0.04), ("/v1/completions", 0.5), ("/generate", 60), ("/metrics", 0.04)):
        gateway.metrics.seconds.labels(route=route).observe(seconds)
    answers = gateway.client.simulate_get("/slots").json["answers"]
    counts = dict(zip((*answers["bounds_s"], "all"), answers["counts"], strict=True))
    assert (counts[0.03], counts[0.05], counts[0.3], counts[0.5], counts[30], counts["all"]) == (0, 1, 1, 2, 2, 3)


@pytest.mark.parametrize("document", ["nginx.conf", "grafana/dashboard.json"])
def test_the_routes_of_completions_are_those_of_the_proxy_and_the_dashboard(gateway: Gateway, document: str) -> None:
    routes = {path for path, route in gateway.app.routes.items() if route.work is Work.COMPLETIONS} - {"/"}
    assert routes == ROUTES - {"/invocations"}
    text = (ROOT / "deploy/supervision" / document).read_text()
    assert all(re.search(rf"[|(/]{route[1:]}[|)]", text) for route in routes)


@pytest.mark.parametrize(("accept", "is_page"), [(BROWSER, True), ("*/*", False), ("application/json", False)])
def test_a_browser_gets_the_page(gateway: Gateway, accept: str, is_page: bool) -> None:
    response = gateway.client.simulate_get("/slots", headers={"Accept": accept})
    assert response.headers["Content-Type"].startswith("text/html" if is_page else "application/json")
    assert "Accept" in response.headers["Vary"]
    if is_page:
        assert response.content == (STATIC / "slots.html").read_bytes()
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")


def test_the_figures_need_a_key_and_the_page_does_not(make_gateway: MakeGateway, tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "keys", "test", None, None)
    client = make_gateway(keys=str(tmp_path / "keys")).client
    assert client.simulate_get("/slots").status_code == 401
    assert client.simulate_get("/slots", headers={"x-api-key": key}).status_code == 200
    assert client.simulate_get("/slots", headers={"Accept": BROWSER}).status_code == 200
    assert client.simulate_get("/metrics", headers={"Accept": BROWSER}).status_code == 401
    assert client.simulate_post("/slots", headers={"Accept": BROWSER}).status_code == 401
