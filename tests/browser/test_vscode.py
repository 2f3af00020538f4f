"""The VS Code extension in VS Code itself: its workbench in Chromium, its extension host in Node.

VS Code is what code-server's package for npm contains. Its modules in C++ are not built, because they need headers from
nodejs.org: without them it logs an error, and has no terminal.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from deploy.clients.npm.client_package import npm
from deploy.clients.plugins import PUBLISHED_BEFORE, build_vscode
from tests.browser.driver import SURE
from tests.e2e.harness import PATIENCE_S, Tercet, free_port, until
from tests.editor_plugins import build_plugin, running_with_key
from tests.npm_package import NpmPackage

CODE_SERVER = "4.96.4"  # VS Code 1.96, the last for Node 20
INSTALL = ("install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-timeout=20000")
START_S = 60


@dataclass(frozen=True)
class Workbench:
    """A window of VS Code with one file, that Chromium shows."""

    page: Page
    file: Path

    @property
    def ghost(self) -> Locator:
        return self.page.locator(".ghost-text-decoration")

    @property
    def problem(self) -> Locator:
        """The extension's item in the status bar."""
        return self.page.locator(".statusbar-item", has_text="Tercet")

    def type(self, text: str) -> None:
        self.page.locator(".monaco-editor .view-lines").click()
        self.page.keyboard.type(text, delay=30)

    def run(self, command: str) -> None:
        """Run a command of the palette."""
        self.page.keyboard.press("F1")
        self.page.keyboard.type(command)
        self.page.locator(".quick-input-list .monaco-list-row", has_text=command).first.click()

    def set_key(self, key: str) -> None:
        self.run("Tercet: Set API Key")
        field = self.page.locator(".quick-input-box input[type=password]")
        field.fill(key)
        field.press("Enter")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tercet, str]]:
    with running_with_key(tmp_path_factory.mktemp("t")) as server:
        yield server


@pytest.fixture(scope="module")
def vscode(request: pytest.FixtureRequest) -> Path:
    """The folder of VS Code's server. Skips the test if it cannot be installed."""
    assert request.config.cache is not None
    work = request.config.cache.mkdir(f"code-server-{CODE_SERVER}")
    folder = work / "node_modules/code-server/lib/vscode"
    if not (work / "installed").exists():  # made last, so an interrupted installation is repeated
        try:
            npm(*INSTALL, f"--before={PUBLISHED_BEFORE}", f"code-server@{CODE_SERVER}", directory=work)
            # It names a package at GitHub, which npm's registry has as well.
            (folder / "npm-shrinkwrap.json").unlink()
            npm(*INSTALL, "--omit=dev", f"--before={PUBLISHED_BEFORE}", directory=folder)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"npm could not install VS Code: {error}; {getattr(error, 'stderr', '') or ''}")
        (work / "installed").touch()
    return folder


@pytest.fixture(scope="module")
def vsix(npm_package: NpmPackage, request: pytest.FixtureRequest) -> Path:
    return build_plugin("vscode", build_vscode, npm_package, request)


@pytest.fixture(scope="module")
def served(
    vscode: Path, vsix: Path, server: tuple[Tercet, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """VS Code's server with the extension, for the server under test; yields its URL."""
    base, port, (tercet, _) = tmp_path_factory.mktemp("vscode"), free_port(), server
    with zipfile.ZipFile(vsix) as archive:
        archive.extractall(base / "unpacked")
    (base / "extensions").mkdir()
    shutil.move(base / "unpacked/extension", base / "extensions/tercet.tercet")
    settings = base / "data/data/Machine/settings.json"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"tercet.url": tercet.url}))
    command: list[str | Path] = [
        "node",
        vscode / "out/server-main.js",
        *("--without-connection-token", "--telemetry-level", "off", "--host", "127.0.0.1", "--port", str(port)),
        *("--server-data-dir", base / "data", "--extensions-dir", base / "extensions"),
    ]
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        try:
            return httpx.get(url).is_success
        except httpx.TransportError:
            return False

    with (base / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until(is_up, START_S, "VS Code's server answers")
            yield url
        finally:
            process.terminate()


@pytest.fixture
def workbench(browser: Browser, served: str, tmp_path: Path) -> Iterator[Workbench]:
    """A window with a new file."""
    with browser.new_context(viewport={"width": 1100, "height": 700}) as context:
        page, file = context.new_page(), tmp_path / "note.md"
        file.write_text("")
        page.set_default_timeout(1000 * START_S)
        opened = json.dumps([["openFile", f"vscode-remote://{served.removeprefix('http://')}{file}"]])
        page.goto(f"{served}/?folder={tmp_path}&payload={opened}")
        expect(page.get_by_role("tab", name=file.name)).to_be_visible(timeout=1000 * START_S)
        page.get_by_role("button", name="Yes, I trust the authors").click()
        yield Workbench(page, file)


def test_a_missing_key_is_named_and_with_it_words_appear_and_tab_accepts_them(
    workbench: Workbench, server: tuple[Tercet, str]
) -> None:
    def is_problem_shown() -> bool:
        workbench.type("So. ")
        workbench.page.wait_for_timeout(500)
        return workbench.problem.is_visible()

    until(is_problem_shown, START_S, "the extension, which starts after the workbench, shows what is missing")
    expect(workbench.problem).to_contain_text("API key required")
    expect(workbench.ghost).to_have_count(0)
    workbench.set_key(server[1])
    workbench.type(SURE)
    expect(workbench.ghost).to_be_visible()
    shown = (workbench.ghost.text_content() or "").replace("\N{NO-BREAK SPACE}", " ")
    workbench.page.keyboard.press("Tab")
    expect(workbench.ghost.filter(has_text=shown.strip())).to_have_count(0)
    expect(workbench.problem).to_have_count(0)
    workbench.page.keyboard.press("Control+s")
    until(lambda: workbench.file.read_text().endswith(SURE + shown), PATIENCE_S, "the accepted text in the file")
