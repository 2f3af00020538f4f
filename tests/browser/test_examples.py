"""The examples of docs/EDITOR.md and of the npm package's README, as a reader runs them, in pages of another origin."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from deploy.clients.npm import client_package
from deploy.clients.plugins import PUBLISHED_BEFORE
from tests.browser.driver import OPENING, StaticSite, errors_of
from tests.browser.editor_pages import READING_MS, SELECTORS
from tests.e2e.harness import ROOT, Tercet, free_port
from tests.npm_package import NpmPackage, skipping_without_npm

DOCUMENTED = "http://localhost:8000"
MANIFEST = Path(__file__).parent / "wrappers/package.json"
EDITORS = {**SELECTORS, "monaco": ".view-lines"}


def examples_of_the_package() -> list[str]:
    return re.findall(r"```jsx?\n(.*?)```", client_package.README.read_text("utf-8"), re.DOTALL)


def examples_of_the_page() -> list[str]:
    section = (ROOT / "docs/EDITOR.md").read_text().split("## In your own editor")[1].split("\n## ")[0]
    return re.findall(r"```html\n(.*?)```", section, re.DOTALL)


@pytest.fixture(scope="module")
def wrappers(npm_package: NpmPackage, request: pytest.FixtureRequest) -> Path:
    """A folder with the frameworks, the editors and the packed package installed."""
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("wrappers")
    tools, frameworks = (json.loads(path.read_text())["dependencies"] for path in (client_package.TOOLS, MANIFEST))
    manifest = json.dumps({"private": True, "type": "module", "dependencies": tools | frameworks})
    with skipping_without_npm():
        client_package.install(folder, manifest, f"--before={PUBLISHED_BEFORE}")
    package = folder / "node_modules/tercet-client"
    shutil.rmtree(package, ignore_errors=True)
    with tarfile.open(npm_package.packed) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (folder / "unpacked/package").rename(package)
    return folder


def text_of(page: Page, editor: str) -> str:
    """The document of an editor, without text that is only shown."""
    if editor == "textarea":
        return page.locator("textarea").input_value()
    found = page.locator(EDITORS[editor]).evaluate(
        """(element) => {
          const copy = element.cloneNode(true);
          copy.querySelectorAll(".tercet-ghost, [class*=ghost-text]").forEach((ghost) => ghost.remove());
          return copy.textContent;
        }"""
    )
    return str(found).replace("\u00a0", " ")


def write_and_accept(page: Page, editor: str) -> None:
    """Type a text, accept what is suggested, and undo that."""
    page.locator(EDITORS[editor]).click()
    page.keyboard.type(OPENING)
    shown = "ol li" if editor == "textarea" else ".tercet-ghost" if editor != "monaco" else ".ghost-text-decoration"
    if editor == "textarea":
        page.keyboard.press("Alt+Enter")
    expect(page.locator(shown).first).to_be_visible()
    page.wait_for_timeout(READING_MS)
    page.keyboard.press("Tab")
    page.wait_for_timeout(READING_MS)
    accepted = text_of(page, editor)
    assert accepted.startswith(OPENING)
    assert len(accepted.rstrip()) > len(OPENING)
    page.keyboard.press("Control+z")
    page.wait_for_timeout(READING_MS)
    assert text_of(page, editor) == OPENING


@pytest.fixture
def observed(page: Page) -> Iterator[Page]:
    """A page whose scripts must not log errors."""
    errors = errors_of(page, "error")
    yield page
    assert not errors


@pytest.mark.parametrize(
    ("number", "editor"),
    list(enumerate(["textarea", "codemirror", "prosemirror", "textarea", "textarea", "prosemirror", "monaco"])),
    ids=["textarea", "codemirror", "prosemirror", "react", "vue", "tiptap", "monaco"],
)
def test_an_example_of_the_package(
    observed: Page, site: StaticSite, tercet: Tercet, wrappers: Path, number: int, editor: str
) -> None:
    examples = examples_of_the_package()
    assert len(examples) == 7
    assert DOCUMENTED in examples[number]
    source = wrappers / f"example_{number}.jsx"
    source.write_text(examples[number].replace(DOCUMENTED, tercet.url))
    target = site.folder / f"examples/{number}.js"
    options = ["--bundle", "--format=iife", "--jsx=automatic", "--loader:.ttf=dataurl", "--log-level=error"]
    command: list[Any] = [wrappers / "node_modules/.bin/esbuild", source.name, *options, f"--outfile={target}"]
    done = subprocess.run(command, cwd=wrappers, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    style = f'<link rel="stylesheet" href="examples/{number}.css">' if target.with_suffix(".css").exists() else ""
    head = '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
    (site.folder / "example.html").write_text(f'{head}{style}<body><script src="examples/{number}.js"></script>')
    observed.goto(f"{site.origin}/example.html")
    write_and_accept(observed, editor)


@pytest.mark.parametrize(("number", "editor"), list(enumerate(["textarea", "codemirror"])))
def test_an_example_of_the_documentation(
    observed: Page, site: StaticSite, tercet: Tercet, number: int, editor: str
) -> None:
    examples = examples_of_the_page()
    assert len(examples) == 2
    assert f"{DOCUMENTED}/" in examples[number]
    code = examples[number].replace(DOCUMENTED, tercet.url)
    (site.folder / "example.html").write_text(f'<!doctype html><link rel="icon" href="data:,">{code}')
    observed.goto(f"{site.origin}/example.html")
    write_and_accept(observed, editor)


def test_a_page_whose_origin_is_not_listed_learns_what_is_missing(page: Page, site: StaticSite, tercet: Tercet) -> None:
    """The module loads from the server, and tells apart a server that refuses the page and one that is away."""
    (site.folder / "unlisted.html").write_text('<!doctype html><link rel="icon" href="data:,">')
    ask = """async (url) => {
      globalThis.module ??= await import(`${url}/static/tercet.js`);
      const client = new module.Client({ url });
      return client.complete({ context: "The sea" }).catch(({ status, code, message }) => ({ status, code, message }));
    }"""
    origin = site.origin.replace("127.0.0.1", "localhost")
    page.goto(f"{origin}/unlisted.html")
    found = page.evaluate(ask, tercet.url)
    message = f"The server does not accept pages of {origin}: add this origin to its setting TERCET_ORIGINS."
    assert found == {"status": 403, "code": "forbidden_origin", "message": message}
    assert page.evaluate(ask, f"http://127.0.0.1:{free_port()}")["code"] == "unreachable"
