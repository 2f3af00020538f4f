"""How the page and its files are served."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.browser.driver import Site
from tests.e2e.harness import Tercet

PATHS = ["/", "/static/tercet.js", "/static/style.css", "/static/icon.svg"]


@pytest.mark.parametrize("path", PATHS)
def test_strictly(tercet: Tercet, path: str) -> None:
    answer = tercet.client.get(path)
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = tercet.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = tercet.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    for method in ("POST", "PUT", "DELETE"):
        assert tercet.client.request(method, path, content=b"{}").status_code in {404, 405}


@pytest.mark.parametrize("path", ["/static/", "/static/nothing.js", "/static/../app.py", "/static/..%2fapp.py"])
def test_nothing_else(tercet: Tercet, path: str) -> None:
    assert tercet.client.get(path).status_code == 404


def test_one_page_one_stylesheet_no_other_host(tercet: Tercet) -> None:
    page = tercet.client.get("/").text
    assert page.count('<link rel="stylesheet"') == page.count("<script") == 1
    names = re.findall(r'(?:src|href)="([^"]+)"', page)
    texts = [page, *(tercet.client.get(f"/{name}").text for name in names)]
    assert not [text for text in texts for found in re.findall(r"https?://[^\s\"']+", text) if "w3.org" not in found]
    assert "<style" not in page
    assert " style=" not in page


def test_a_listed_origin_may_import_the_client(tercet: Tercet, site: Site) -> None:
    listed = tercet.client.get("/static/tercet.js", headers={"Origin": site.origin})
    assert listed.headers["access-control-allow-origin"] == site.origin
    other = tercet.client.get("/static/tercet.js", headers={"Origin": "http://elsewhere.example"})
    assert other.status_code == 403


def test_the_client_is_served_as_it_is_to_a_plain_reader(tercet: Tercet) -> None:
    answer = httpx.get(f"{tercet.url}/static/tercet.js", trust_env=False)
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "export class Completer" in answer.text
