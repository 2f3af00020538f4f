"""The pages behind nginx, below a path of its own: `deploy/supervision/nginx.conf` with its lines for that.

That a proxy may also leave its path in requests is tested in tests/gateway/test_paths.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.e2e.harness import free_port, running
from tests.nginx import nginx

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="apt-get install nginx-light")
PATH = "/tools/tercet"
REMOVED = {"# rewrite ^/tools": "rewrite ^/tools"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """At which clients reach the server."""
    base = tmp_path_factory.mktemp("below")
    port = free_port()
    url = f"http://127.0.0.1:{port}{PATH}"
    with running(base / "t", public_url=url) as tercet, nginx(base, tercet.port, REMOVED, port):
        yield url


def test_the_pages_ask_for_nothing_outside_the_path(page: Page, url: str) -> None:
    page.set_default_timeout(30_000)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(url)
    expect(page).to_have_url(f"{url}/")
    page.locator("#text").click()
    page.keyboard.insert_text("The old man looked at the sea and")
    # A request that the next key supersedes is answered too, with 409.
    with page.expect_response(lambda response: response.url == f"{url}/autocomplete" and response.ok):
        page.locator("#text").press("End")
        page.locator("#text").press_sequentially(" the")
    scope = page.evaluate("navigator.serviceWorker.ready.then((worker) => worker.scope)")
    assert scope == f"{url}/"
    page.goto(f"{url}/docs/")
    expect(page).to_have_url(f"{url}/docs")
    page.locator(".opblock", has=page.locator('[data-path="/health/live"]')).click()
    with page.expect_response(f"{url}/health/live") as answered:
        page.get_by_role("button", name="Execute").click()
    assert answered.value.status == 200
    assert not [address for address in requested if not address.startswith(url)]


def test_a_job_is_found_at_its_location(url: str) -> None:
    with httpx.Client(trust_env=False, timeout=30) as http:
        submitted = http.post(f"{url}/jobs", json={"prompt": "The old man", "length": 3})
        assert submitted.status_code == 202
        location = submitted.headers["Location"]
        assert location.startswith(f"{PATH}/jobs/")
        assert http.get(httpx.URL(url).join(location)).status_code == 200
        preferred = http.post(f"{url}/autocomplete", json={"context": "a"}, headers={"Prefer": "respond-async"})
        assert preferred.headers["Location"].startswith(f"{PATH}/jobs/")
        assert http.get(f"{url}/endpoint").text == url


def test_figures_of_the_machine_stay_with_the_machine(url: str) -> None:
    """Where nginx removes the path, its rules for a path hold below it too."""
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    with httpx.Client(transport=transport, trust_env=False) as foreign:
        assert foreign.get(f"{url}/metrics").status_code == 403
        assert foreign.get(f"{url}/health/ready").status_code == 200
