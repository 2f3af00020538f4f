"""Clients in pages of other origins than the server's: OpenAI's JavaScript SDK, and a page of an unpacked extension."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Playwright, Request

from tests.browser.conftest import ARGUMENTS, CHROMIUM
from tests.browser.driver import StaticSite
from tests.e2e.harness import Tercet
from tests.npm_package import NpmPackage

FETCH = """async (url) => {
  const response = await fetch(`${url}/v1/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: "Bearer none", "X-Client-Name": "notes" },
    body: JSON.stringify({ prompt: "The sea", max_tokens: 4 }),
  });
  return { status: response.status, id: response.headers.has("x-request-id"), body: await response.json() };
}"""


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


@pytest.fixture
def extension_page(playwright: Playwright, extension: Path, extension_origin: str, tmp_path: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium)")
    arguments = [*ARGUMENTS, f"--load-extension={extension}", f"--disable-extensions-except={extension}"]
    with playwright.chromium.launch_persistent_context(
        tmp_path, executable_path=CHROMIUM, args=arguments, ignore_default_args=["--disable-extensions"]
    ) as context:
        page = context.new_page()
        page.goto(f"{extension_origin}/page.html")
        yield page


def test_a_page_of_a_listed_extension_completes(extension_page: Page, tercet: Tercet) -> None:
    answer = extension_page.evaluate(FETCH, tercet.url)
    assert (answer["status"], answer["id"]) == (200, True)
    assert answer["body"]["choices"][0]["text"]
