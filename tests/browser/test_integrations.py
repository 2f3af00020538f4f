"""The two integration examples of docs/EDITOR.md, run unchanged in pages of another origin."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from deploy.npm.build import TOOLS
from tests.browser.driver import OPENING, TIMEOUT_MS, StaticSite
from tests.e2e.harness import ROOT, Tercet
from tests.npm_package import NpmPackage

MAX_LINES = 15
VALUE_WITHOUT_GHOST_TEXT = """(content) => {
  const copy = content.cloneNode(true);
  for (const ghost of copy.querySelectorAll(".tercet-ghost")) ghost.remove();
  return Array.from(copy.querySelectorAll(".cm-line"), (line) => line.textContent).join("\\n");
}"""


def snippet(language: str, tercet: Tercet) -> str:
    """Return a code block of the page's section, with the URL of the server under test."""
    section = (ROOT / "docs/EDITOR.md").read_text().split("## In your own editor")[1].split("\n## ")[0]
    [code] = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert len(code.splitlines()) <= MAX_LINES
    assert "http://localhost:8000/" in code
    return str(code).replace("http://localhost:8000/", f"{tercet.url}/")


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.context.close()
    assert not errors


def test_a_plain_textarea(page: Page, site: StaticSite, tercet: Tercet) -> None:
    (site.folder / "plain.html").write_text(f"<!doctype html><title>Notes</title>{snippet('html', tercet)}")
    page.goto(f"{site.origin}/plain.html")
    text = page.locator("textarea")
    exercise(page, text, text.input_value)


def test_codemirror(page: Page, site: StaticSite, tercet: Tercet, modules: dict[str, str]) -> None:
    imports = json.dumps({"imports": modules})
    (site.folder / "codemirror.html").write_text(
        f'<!doctype html><title>Notes</title><script type="importmap">{imports}</script>'
        f'<body><script type="module">\n{snippet("js", tercet)}</script>'
    )
    page.goto(f"{site.origin}/codemirror.html")
    text = page.locator(".cm-content")
    exercise(page, text, lambda: text.evaluate(VALUE_WITHOUT_GHOST_TEXT))


def exercise(page: Page, text: Locator, value: Callable[[], str]) -> None:
    """Request, choose, accept a word, accept the rest, undo, dismiss, and leave."""
    rows = page.locator("ol li")
    chosen = page.locator("ol li[aria-current=true]")
    text.click()
    page.keyboard.type(OPENING)
    page.keyboard.press("Alt+Enter")
    expect(rows).to_have_count(3)
    wait_until_stable(chosen)
    page.keyboard.press("ArrowDown")
    expect(rows.nth(1)).to_have_attribute("aria-current", "true")
    page.keyboard.press("ArrowRight")
    word = value().removeprefix(OPENING)
    assert re.fullmatch(r"\s*\S+ ?", word)
    rest = wait_until_stable(chosen)
    page.keyboard.press("Enter")
    assert value().rstrip() == OPENING + word + rest.rstrip()
    page.keyboard.press("Control+z")
    assert value() == OPENING + word
    page.keyboard.press("Alt+Enter")
    expect(rows.first).to_be_visible()
    page.keyboard.press("Escape")
    expect(rows).to_have_count(0)
    assert value() == OPENING + word
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    expect(text).not_to_be_focused()


def wait_until_stable(row: Locator) -> str:
    """A suggestion's text after half a second without a change; it is then taken to be complete."""
    text, since = row.text_content(), time.monotonic()
    while time.monotonic() < since + 0.5:
        row.page.wait_for_timeout(20)
        if row.text_content() != text:
            text, since = row.text_content(), time.monotonic()
    assert text
    return text


@pytest.fixture(scope="session")
def modules(npm_package: NpmPackage, site: StaticSite) -> dict[str, str]:
    """Import map of the modules of CodeMirror: name to path on the site."""
    folder = npm_package.tools / "node_modules"
    (site.folder / "modules").symlink_to(folder)
    paths = {}
    for name in json.loads(TOOLS.read_text())["dependencies"]:
        exports = json.loads((folder / name / "package.json").read_text()).get("exports", {})
        if "import" in exports:
            paths[name] = f"/modules/{name}/{exports['import'].removeprefix('./')}"
    return paths
