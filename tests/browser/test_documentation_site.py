"""The documentation as a site: it builds without a warning, links as the repository does, and is searched offline."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from deploy.packaging.site.documentation import render, stage
from tests.browser.driver import TIMEOUT_MS, StaticSite, static_site


@pytest.fixture(scope="module")
def documentation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StaticSite]:
    base = tmp_path_factory.mktemp("documentation")
    stage(base / "source")
    render(base / "source", base / "site")
    with static_site(base / "site") as served:
        yield served


def test_the_search_finds_a_section_and_asks_no_other_server(documentation: StaticSite, page: Page) -> None:
    foreign: list[str] = []
    own = (documentation.origin, "data:", "blob:")
    page.on("request", lambda request: None if request.url.startswith(own) else foreign.append(request.url))
    page.goto(f"{documentation.origin}/index.html")
    page.get_by_placeholder("Search").fill("TercetJobsFail")
    hit = page.locator(".md-search-result__link").first
    expect(hit).to_be_visible(timeout=3 * TIMEOUT_MS)  # the index is read first
    hit.click()
    expect(page.locator("article")).to_contain_text("TercetJobsFail")
    assert foreign == []


def test_files_beside_the_pages_are_linked(documentation: StaticSite, page: Page) -> None:
    page.goto(f"{documentation.origin}/docs/OPERATIONS.html")
    target = page.locator('a[href$="deploy/supervision/nginx.conf"]').first.get_attribute("href")
    assert page.request.get(f"{documentation.origin}/docs/{target}").status == 200


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    source, targets = tmp_path / "source", ("NOPE.md", "OPERATIONS.md#no-such-section")
    stage(source)
    with (source / "docs/API.md").open("a", encoding="utf-8") as page:
        page.write("".join(f"\n[broken]({target})\n" for target in targets))
    with pytest.raises(subprocess.CalledProcessError) as failure:
        render(source, tmp_path / "site")
    assert all(f"'docs/API.md' contains a link '{target}'" in failure.value.stderr for target in targets)
