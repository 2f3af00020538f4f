"""HTTP behaviour of the page and its static files."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.browser.driver import StaticSite
from tests.e2e.harness import Tercet

PATHS = ["/", "/docs", "/service_worker.js", "/static/tercet.js", "/static/style.css", "/static/icon.svg"]


@pytest.mark.parametrize("path", PATHS)
def test_files_are_served_with_security_headers_and_etags(tercet: Tercet, path: str) -> None:
    response = tercet.client.get(path)
    assert response.status_code == 200
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    revalidated = tercet.client.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert (revalidated.status_code, revalidated.content) == (304, b"")
    head = tercet.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    # `POST /` is a request of Text Generation Inference.
    for method in ("PUT", "DELETE") if path == "/" else ("POST", "PUT", "DELETE"):
        assert tercet.client.request(method, path, content=b"{}").status_code in {404, 405}


@pytest.mark.parametrize("path", ["/static/", "/static/nothing.js", "/static/../app.py", "/static/..%2fapp.py"])
def test_other_paths_are_not_found(tercet: Tercet, path: str) -> None:
    assert tercet.client.get(path).status_code == 404


def test_the_page_has_one_stylesheet_and_one_script_and_names_no_other_host(tercet: Tercet) -> None:
    page = tercet.client.get("/").text
    assert page.count('<link rel="stylesheet"') == page.count("<script") == 1
    names = re.findall(r'(?:src|href)="([^"]+)"', page)
    texts = [page, *(tercet.client.get(f"/{name}").text for name in names)]
    assert not [text for text in texts for url in re.findall(r"https?://[^\s\"']+", text) if "w3.org" not in url]
    assert "<style" not in page
    assert " style=" not in page


def test_a_listed_origin_may_import_the_client(tercet: Tercet, site: StaticSite) -> None:
    listed = tercet.client.get("/static/tercet.js", headers={"Origin": site.origin})
    assert listed.headers["access-control-allow-origin"] == site.origin
    other = tercet.client.get("/static/tercet.js", headers={"Origin": "http://elsewhere.example"})
    assert other.status_code == 403


def test_the_client_module_is_served_as_javascript(tercet: Tercet) -> None:
    response = httpx.get(f"{tercet.url}/static/completer.js", trust_env=False)
    assert response.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "export class Completer" in response.text
