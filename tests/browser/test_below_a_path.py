"""The pages behind nginx, below a path of its own: `deploy/supervision/nginx.conf` with its lines for that.

That a proxy may also leave its path in requests is tested in tests/gateway/test_paths.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.harness import Tercet, free_port, running
from tests.nginx import nginx

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="apt-get install nginx-light")
PATH = "/tools/tercet"
REMOVED = {"# rewrite ^/tools": "rewrite ^/tools"}


@dataclass
class Below:
    """A server, and the URL at which clients reach it."""

    tercet: Tercet
    url: str


@pytest.fixture(scope="module")
def below(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Below]:
    base = tmp_path_factory.mktemp("below")
    port = free_port()
    url = f"http://127.0.0.1:{port}{PATH}"
    with running(base / "t", public_url=url) as tercet, nginx(base, tercet.port, REMOVED, port):
        yield Below(tercet, url)


@pytest.fixture
def page(browser: Browser, below: Below) -> Iterator[Page]:
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(30_000)
        yield page
        assert not [request for request in requested if not request.startswith(below.url)]


requested: list[str] = []


@pytest.fixture(autouse=True)
def observe(page: Page) -> None:
    requested.clear()
    page.on("request", lambda request: requested.append(request.url))


def test_the_editor_completes_and_registers_its_service_worker(page: Page, below: Below) -> None:
    page.goto(f"{below.url}/")
    page.locator("#text").click()
    page.keyboard.insert_text("The old man looked at the sea and")
    # A request that the next key supersedes is answered too, with 409.
    with page.expect_response(lambda response: response.url == f"{below.url}/autocomplete" and response.ok):
        page.locator("#text").press("End")
        page.locator("#text").press_sequentially(" the")
    scope = page.evaluate("navigator.serviceWorker.ready.then((worker) => worker.scope)")
    assert scope == f"{below.url}/"


def test_the_documentation_sends_its_requests_below_the_path(page: Page, below: Below) -> None:
    page.goto(f"{below.url}/docs/")
    expect(page).to_have_url(f"{below.url}/docs")
    page.locator(".opblock", has=page.locator('[data-path="/health/live"]')).click()
    with page.expect_response(f"{below.url}/health/live") as answered:
        page.get_by_role("button", name="Execute").click()
    assert answered.value.status == 200


def test_the_path_without_a_slash_opens_the_page(page: Page, below: Below) -> None:
    page.goto(below.url)
    expect(page).to_have_url(f"{below.url}/")
    expect(page.locator("#text")).to_be_visible()


def test_a_job_is_found_at_its_location(below: Below) -> None:
    with httpx.Client(trust_env=False, timeout=30) as http:
        submitted = http.post(f"{below.url}/jobs", json={"prompt": "The old man", "length": 3})
        assert submitted.status_code == 202
        location = submitted.headers["Location"]
        assert location.startswith(f"{PATH}/jobs/")
        assert http.get(httpx.URL(below.url).join(location)).status_code == 200
        preferred = http.post(f"{below.url}/autocomplete", json={"context": "a"}, headers={"Prefer": "respond-async"})
        assert preferred.headers["Location"].startswith(f"{PATH}/jobs/")
        assert http.get(f"{below.url}/endpoint").text == below.url


def test_figures_of_the_machine_stay_with_the_machine(below: Below) -> None:
    """Where nginx removes the path, its rules for a path hold below it too."""
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(transport=transport, trust_env=False) as foreign:
        assert foreign.get(f"{below.url}/metrics").status_code == 403
        assert foreign.get(f"{below.url}/health/ready").status_code == 200
