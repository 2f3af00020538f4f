"""The Obsidian plug-in, built and loaded into a page with a real CodeMirror editor, under a stand-in for Obsidian."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from deploy.clients.plugins import build_obsidian
from tests.browser.driver import OPENING, StaticSite
from tests.browser.editor_pages import READING_MS, EditorPage
from tests.e2e.harness import PATIENCE_S, Tercet, free_port, until
from tests.editor_plugins import build_plugin, running_with_key
from tests.npm_package import NpmPackage


class Obsidian(EditorPage):
    """A page with an editor, in which the plug-in is loaded."""

    def __init__(self, page: Page, plugin: Path) -> None:
        super().__init__(page, "codemirror", is_framed=False)
        self._plugin = plugin
        self.notices = page.get_by_role("alert")
        self.status = page.get_by_role("status")
        self.settings = page.get_by_label("Settings", exact=True)

    def load(self, settings: dict[str, Any], secrets: dict[str, str]) -> None:
        code = (self._plugin / "main.js").read_text()
        manifest = json.loads((self._plugin / "manifest.json").read_text())
        self.call("load", code, manifest, settings, secrets)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the stand-in."""
        return self.page.evaluate("([name, args]) => host[name](...args)", [name, list(arguments)])

    def type_and_wait_for_response(self, text: str) -> None:
        """Type a text, and wait until the page has handled a response to it."""
        num_requests = len(self.requests)
        self.type(text)
        self.wait_for_num_requests(num_requests + 1)
        self.wait_for_responses()
        self.page.wait_for_timeout(READING_MS)

    def accept(self) -> None:
        """Accept the ghost text with Tab, as soon as it has been visible for long enough."""
        before = self.value
        shown = self.ghost.text_content()
        assert shown

        def is_accepted() -> bool:
            self.press("Tab")
            return self.value != before

        until(is_accepted, PATIENCE_S, "the suggestion accepted")
        assert self.value.startswith(before + shown)  # it may have grown since


@pytest.fixture(scope="module")
def server(site: StaticSite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tercet, str]]:
    with running_with_key(tmp_path_factory.mktemp("t"), site.origin) as server:
        yield server


@pytest.fixture(scope="module")
def plugin(npm_package: NpmPackage, request: pytest.FixtureRequest) -> Path:
    return build_plugin("obsidian", build_obsidian, npm_package, request)


@pytest.fixture(scope="module")
def script(plugin: Path) -> Path:
    """The stand-in, type-checked against Obsidian's types in the plug-in's work folder, and bundled."""
    folder, binaries = plugin.parent / "host", plugin.parent / "node_modules/.bin"
    folder.mkdir(exist_ok=True)
    source = Path(shutil.copy(Path(__file__).with_name("obsidian_host.ts"), folder))
    config = {"extends": "../tsconfig.json", "compilerOptions": {"types": []}, "files": [source.name]}
    (folder / "tsconfig.json").write_text(json.dumps(config))
    check = subprocess.run([binaries / "tsc", "--noEmit"], cwd=folder, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    bundle = folder / "obsidian_host.mjs"
    options = (source.name, "--bundle", "--format=esm", "--log-level=warning", f"--outfile={bundle}")
    subprocess.run([binaries / "esbuild", *options], cwd=folder, check=True)
    return bundle


@pytest.fixture
def obsidian(page: Page, site: StaticSite, plugin: Path, script: Path) -> Obsidian:
    """A page of another origin than the server's, as Obsidian's is; the plug-in is not loaded yet."""
    (site.folder / "obsidian.html").write_text(
        f"<!doctype html><title>Vault</title><style>{(plugin / 'styles.css').read_text()}</style><body>"
        f'<script type="module">{script.read_text()}</script>'
    )
    page.goto(f"{site.origin}/obsidian.html")
    return Obsidian(page, plugin)


@pytest.fixture
def load(obsidian: Obsidian, server: tuple[Tercet, str]) -> Callable[..., Obsidian]:
    """Loads the plug-in with settings that name the server under test."""
    tercet, key = server

    def load(**settings: Any) -> Obsidian:
        obsidian.load({"url": tercet.url, "secret": "tercet-key", **settings}, {"tercet-key": key})
        return obsidian

    return load


def test_the_folder_has_what_obsidian_reads(plugin: Path) -> None:
    assert {path.name for path in plugin.iterdir()} == {"main.js", "manifest.json", "styles.css"}
    manifest = json.loads((plugin / "manifest.json").read_text())
    assert manifest["id"] == plugin.name  # Obsidian requires it
    assert set(manifest) >= {"id", "name", "version", "minAppVersion", "description", "author", "isDesktopOnly"}


def test_typing_shows_ghost_text_and_tab_accepts_it(load: Callable[..., Obsidian]) -> None:
    obsidian = load()
    expect(obsidian.status).to_have_text("Tercet: live")
    obsidian.type("The old man looked at ")
    expect(obsidian.ghost).to_be_visible()
    assert obsidian.value == "The old man looked at "  # ghost text is not part of it
    obsidian.accept()
    assert obsidian.requests[-1]["strategy"] == "predict"
    obsidian.press("Control+z")
    assert obsidian.value == "The old man looked at "


@pytest.mark.parametrize("key", ["Tab", "Enter", "Escape", "ArrowDown", "ArrowRight"])
def test_the_keys_of_an_open_list_are_left_to_it(load: Callable[..., Obsidian], key: str) -> None:
    obsidian = load(isOn=False)
    obsidian.type(OPENING)
    obsidian.call("run", "suggest")
    expect(obsidian.items).to_have_count(3)
    obsidian.page.wait_for_timeout(READING_MS)
    obsidian.call("openList")
    obsidian.press(key)
    assert obsidian.call("listKeys") == [key]
    assert obsidian.value.strip() == OPENING.strip()


def test_nothing_comes_unasked_in_code_unless_the_setting_is_off(load: Callable[..., Obsidian]) -> None:
    obsidian = load()
    obsidian.type("~~~\n")
    obsidian.page.wait_for_timeout(READING_MS)
    num_requests = len(obsidian.requests)
    obsidian.type(OPENING)
    obsidian.page.wait_for_timeout(READING_MS)
    assert len(obsidian.requests) == num_requests
    obsidian.call("run", "suggest")
    expect(obsidian.items).to_have_count(3)
    obsidian.press("Escape")
    obsidian.call("openSettings")
    obsidian.settings.get_by_label("Only in prose").uncheck()
    obsidian.type_and_wait_for_response(" and")
    assert obsidian.call("stored")["proseOnly"] is False


def test_tab_indents_while_nothing_is_shown(load: Callable[..., Obsidian]) -> None:
    obsidian = load(isOn=False)
    obsidian.type("- one")
    obsidian.press("Tab")
    assert obsidian.value == "  - one"
    assert not obsidian.requests


def test_the_command_suggest_lists_three_ideas_in_every_mode(load: Callable[..., Obsidian]) -> None:
    obsidian = load(isOn=False)
    expect(obsidian.status).to_have_text("Tercet: off")
    obsidian.type(OPENING)
    obsidian.call("run", "suggest")
    expect(obsidian.items).to_have_count(3)
    obsidian.press("Alt+ArrowDown")
    expect(obsidian.items.nth(1)).to_have_attribute("aria-current", "true")
    obsidian.accept()
    expect(obsidian.items).to_have_count(0)


def test_the_command_toggle_turns_suggestions_off_and_on(load: Callable[..., Obsidian]) -> None:
    obsidian = load()
    obsidian.call("run", "toggle")
    expect(obsidian.status).to_have_text("Tercet: off")
    assert obsidian.call("stored")["isOn"] is False
    obsidian.type("The old man looked at ")
    assert obsidian.value == "The old man looked at "
    assert not obsidian.requests
    obsidian.call("run", "toggle")
    expect(obsidian.status).to_have_text("Tercet: live")
    obsidian.type("the ")
    expect(obsidian.ghost).to_be_visible()


def test_settings_apply_at_once_and_are_stored(load: Callable[..., Obsidian]) -> None:
    obsidian = load(secret="", model="")
    obsidian.call("openSettings")
    obsidian.settings.get_by_label("API key").fill("tercet-key")
    obsidian.settings.get_by_label("Model").fill("slow")
    obsidian.settings.get_by_label("Eagerness").select_option("0.7")
    obsidian.settings.get_by_label("Suggest").select_option("pauses")
    expect(obsidian.status).to_have_text("Tercet: pauses")
    obsidian.type("The old man looked at ")
    expect(obsidian.ghost).to_be_visible()
    assert {request["model_size"] for request in obsidian.requests} == {"slow"}
    stored = obsidian.call("stored")
    assert stored == {**stored, "secret": "tercet-key", "model": "slow", "mode": "pauses", "minProbability": 0.7}


def test_predictions_of_little_use_are_held_back(load: Callable[..., Obsidian]) -> None:
    obsidian = load(minUsefulness=100)
    obsidian.type_and_wait_for_response("The old man looked at ")
    expect(obsidian.ghost).to_have_count(0)
    obsidian.call("run", "suggest")
    expect(obsidian.items).to_have_count(3)


def test_a_bad_key_is_reported_once_and_names_the_setting(load: Callable[..., Obsidian]) -> None:
    obsidian = load(secret="")
    obsidian.type(OPENING)
    expect(obsidian.notices).to_contain_text("requires a valid API key. Choose its secret in the settings of Tercet.")
    expect(obsidian.status).to_have_text("Tercet: error")
    num_requests = len(obsidian.requests)
    obsidian.call("run", "suggest")
    # Playwright delivers request events only during a call.
    until(lambda: obsidian.value and len(obsidian.requests) > num_requests, PATIENCE_S, "another request")
    obsidian.call("run", "suggest")
    expect(obsidian.notices).to_have_count(1)


def test_a_server_that_does_not_answer_names_its_setting(load: Callable[..., Obsidian], site: StaticSite) -> None:
    obsidian = load(url=f"http://127.0.0.1:{free_port()}/")
    obsidian.type(OPENING)
    expect(obsidian.notices).to_contain_text(f"TERCET_ORIGINS does not list {site.origin}")


def test_unloading_removes_everything(load: Callable[..., Obsidian]) -> None:
    obsidian = load()
    obsidian.type("The old man looked at ")
    expect(obsidian.ghost).to_be_visible()
    obsidian.call("unload")
    expect(obsidian.ghost).to_have_count(0)
    expect(obsidian.status).to_have_count(0)
    num_requests = len(obsidian.requests)
    obsidian.type("the ")
    obsidian.press("Tab")
    assert obsidian.value == "  The old man looked at the "
    assert len(obsidian.requests) == num_requests
