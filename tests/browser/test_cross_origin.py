"""OpenAI's JavaScript SDK in a page of another origin than the server's."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, Request

from tests.browser.driver import StaticSite
from tests.e2e.harness import Tercet
from tests.npm_package import NpmPackage


@pytest.fixture(scope="module")
def sdk_path(npm_package: NpmPackage, site: StaticSite) -> str:
    npm_package.bundle([Path(__file__).with_name("openai_page.ts")], site.folder / "bundles")
    page = '<!doctype html><link rel="icon" href="data:,"><script src="bundles/openai_page.js"></script>'
    (site.folder / "openai.html").write_text(page)
    return "openai.html"


def test_openais_sdk_completes_streams_and_reads_errors(
    page: Page, site: StaticSite, tercet: Tercet, sdk_path: str
) -> None:
    requests: list[Request] = []
    page.on("request", lambda request: requests.append(request))  # noqa: PLW0108  # Playwright refuses built-in methods
    page.goto(f"{site.origin}/{sdk_path}?server={tercet.url}")
    assert "embedded" in page.evaluate("list()")
    text = page.evaluate("complete()")
    assert text
    texts = page.evaluate("stream()")
    assert len(texts) > 1
    assert "".join(texts) == text
    assert page.evaluate("fail()") == {"status": 404, "param": "model", "hasRequestId": True}
    sent = [request for request in requests if request.url.endswith("/v1/completions") and request.method == "POST"]
    assert len(sent) == 3
    assert all("x-stainless-retry-count" in request.headers for request in sent)  # what a preflight has to allow
