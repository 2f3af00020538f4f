"""The VS Code extension in VS Code itself: its workbench in Chromium, its extension host in Node.

VS Code is what code-server's package for npm contains. Its modules in C++ are not built, because they need headers from
nodejs.org: without them it logs an error, and has no terminal.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from deploy.clients.npm.client_package import npm
from deploy.clients.plugins import PUBLISHED_BEFORE, build_vscode
from shared.version import tercet_version
from tests.browser.driver import OPENING, SURE, Typist
from tests.e2e.harness import PATIENCE_S, Tercet, free_port, metric, until
from tests.editor_plugins import build_plugin, running_with_key
from tests.npm_package import NpmPackage, skipping_without_npm

CODE_SERVER = "4.96.4"  # VS Code 1.96, the last for Node 20
INSTALL = ("install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-timeout=20000")
START_S = 60
QUIET_MS = 500  # an unasked suggestion would have come
SETTINGS = "data/data/Machine/settings.json"
IN_CODE = f"Look:\n\n```\n{SURE}"


@dataclass(frozen=True)
class Workbench(Typist):
    """A window of VS Code that Chromium shows."""

    page: Page
    base: Path
    tercet: Tercet
    key: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def ghost(self) -> Locator:
        return self.page.locator(".ghost-text-decoration")

    @property
    def problem(self) -> Locator:
        """The extension's item in the status bar."""
        return self.page.locator(".statusbar-item", has_text="Tercet")

    @property
    def num_requests(self) -> float:
        return metric(self.tercet, 'tercet_requests_total{route="/autocomplete"')

    def configure(self, **settings: Any) -> None:
        """Change settings of the extension, all others to their defaults, and wait until VS Code has read them."""
        title = f"settings {next(self._numbers)}"
        values = {f"tercet.{name}": value for name, value in {"url": self.tercet.url, **settings}.items()}
        (self.base / SETTINGS).write_text(json.dumps({"window.title": title, **values}))
        expect(self.page).to_have_title(title)
        self.page.wait_for_timeout(QUIET_MS)  # the extension reads them next

    def open(self, before: str, after: str = "", *, suffix: str = ".md") -> Path:
        """Open a new file, with the caret between the two texts."""
        file = self.base / f"{next(self._numbers)}{suffix}"
        file.write_bytes((before + after).encode())
        self.pick("Control+p", str(file), file.name)
        expect(self.page.get_by_role("textbox", name=file.name, exact=True)).to_be_focused()
        self.press("Control+End", *["ArrowLeft"] * len(after))
        return file

    def pick(self, key: str, query: str, found: str) -> None:
        """Open a list with a key, and pick what the query finds in it."""
        self.press(key)
        self.page.locator(".quick-input-box input").fill(query)
        self.page.locator(".quick-input-list .monaco-list-row", has_text=found).first.click()

    def type(self, text: str) -> None:
        self.page.keyboard.type(text, delay=30)

    def suggestion(self, *, after: str = "") -> str:
        """What is suggested at the caret, as soon as it is, and is not what was suggested before."""

        def shown() -> str:
            text = "".join(self.ghost.all_text_contents()).replace("\N{NO-BREAK SPACE}", " ")
            return "" if text == after else text

        return str(until(shown, PATIENCE_S, "a suggestion"))

    def request(self) -> str:
        """Request suggestions; returns the first."""
        self.press("Alt+\\")
        return self.suggestion()

    def expect_nothing(self) -> None:
        """Nothing is suggested, not even after a while."""
        self.page.wait_for_timeout(QUIET_MS)
        expect(self.ghost).to_have_count(0)

    def expect_num_requests(self, number: float) -> None:
        """All that the server has answered; the last answer has just been shown."""
        until(lambda: self.num_requests >= number, PATIENCE_S, "all requests answered")
        assert self.num_requests == number

    def enter_key(self, key: str) -> None:
        """Answer the command that sets the key."""
        box = self.page.locator(".quick-input-box input[type=password]")
        box.fill(key)
        box.press("Enter")
        expect(box).to_be_hidden()


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest) -> Path:
    """VS Code's server. Skips the test if it cannot be installed."""
    assert request.config.cache is not None
    work = request.config.cache.mkdir(f"code-server-{CODE_SERVER}")
    folder = work / "node_modules/code-server/lib/vscode"
    if not (work / "installed").exists():  # made last, so an interrupted installation is repeated
        with skipping_without_npm():
            npm(*INSTALL, f"--before={PUBLISHED_BEFORE}", f"code-server@{CODE_SERVER}", directory=work)
            # It names a package at GitHub, which npm's registry has as well.
            (folder / "npm-shrinkwrap.json").unlink()
            npm(*INSTALL, "--omit=dev", f"--before={PUBLISHED_BEFORE}", directory=folder)
        (work / "installed").touch()
    return folder / "out/server-main.js"


@pytest.fixture(scope="module")
def window(
    program: Path,
    browser: Browser,
    npm_package: NpmPackage,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Workbench]:
    """A window of a VS Code that has installed the package. The extension has started, and has the key."""
    base, port = tmp_path_factory.mktemp("vscode"), free_port()
    folders = ("--server-data-dir", base / "data", "--extensions-dir", base / "extensions")
    command: list[str | Path] = ["node", program, *folders]
    vsix = build_plugin("vscode", build_vscode, npm_package, request)
    subprocess.run([*command, "--install-extension", vsix], check=True, capture_output=True)
    command += ["--without-connection-token", "--telemetry-level=off", "--host=127.0.0.1", f"--port={port}"]
    with (
        running_with_key(tmp_path_factory.mktemp("t")) as (tercet, key),
        (base / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        browser.new_context(viewport={"width": 2000, "height": 700}) as context,
    ):
        try:
            until(lambda: "listening on" in (base / "log").read_text(), START_S, "VS Code's server listens")
            window = Workbench(context.new_page(), base, tercet, key)
            window.page.set_default_timeout(1000 * START_S)
            window.page.goto(f"http://127.0.0.1:{port}/?folder={base}")
            window.page.get_by_role("button", name="Yes, I trust the authors").click()
            window.configure()
            window.open("")

            def is_problem_shown() -> bool:
                window.type("So. ")
                return window.problem.is_visible()

            until(is_problem_shown, START_S, "the extension, which starts after the workbench, shows what is missing")
            expect(window.problem).to_contain_text("API key required")
            window.problem.click()
            window.enter_key(key)
            yield window
        finally:
            process.terminate()


@pytest.fixture
def workbench(window: Workbench) -> Workbench:
    """The window, with the settings' defaults."""
    window.configure()
    return window


def test_the_package_has_no_sources(window: Workbench) -> None:
    names = {path.name for path in (window.base / f"extensions/tercet.tercet-{tercet_version()}").rglob("*")}
    assert names == {".vsixmanifest", "LICENSE.txt", "extension.js", "package.json", "readme.md"}


def test_words_appear_while_typing_stay_while_they_agree_and_tab_accepts_and_reports_them(workbench: Workbench) -> None:
    saved = "tercet_saved_characters_total"
    file, num_saved = workbench.open(OPENING), metric(workbench.tercet, saved)
    workbench.type(" shook his ")
    shown, num_requests = workbench.suggestion(), workbench.num_requests
    workbench.type(shown[:2])
    workbench.page.wait_for_timeout(QUIET_MS)  # VS Code does not wait for the extension to shorten what is shown
    assert workbench.suggestion() == shown[2:]
    workbench.press("Backspace", "Backspace")
    workbench.expect_nothing()  # after a deletion
    workbench.type(shown[0])
    rest = workbench.suggestion()
    assert rest == shown[1:]
    workbench.expect_num_requests(num_requests)
    workbench.press("Tab", "Control+s")
    until(lambda: file.read_text() == f"{SURE} {shown}", PATIENCE_S, "the accepted text in the file")
    until(lambda: metric(workbench.tercet, saved) > num_saved, PATIENCE_S, "a report")
    assert metric(workbench.tercet, saved) - num_saved == len(rest)
    expect(workbench.problem).to_have_count(0)


def test_a_request_yields_three_alternatives(workbench: Workbench) -> None:
    workbench.open(OPENING)
    shown = [workbench.request()]
    for _ in range(3):
        workbench.press("Alt+]")
        shown.append(workbench.suggestion(after=shown[-1]))
    assert len({*shown}) == 3
    assert shown[0] == shown[3]


@pytest.mark.parametrize(
    ("settings", "before", "after", "num_requests"),
    [
        ({}, SURE, ".”) and sighed", 0),
        ({}, IN_CODE, "", 0),
        ({"mode": "off"}, SURE, "", 0),
        ({"minUsefulness": 100}, SURE, "", 1),
    ],
    ids=["mid-line", "code", "off", "of little use"],
)
def test_nothing_is_offered_unasked_where_it_would_be_in_the_way(
    workbench: Workbench, settings: dict[str, Any], before: str, after: str, num_requests: int
) -> None:
    workbench.configure(**settings)
    workbench.open(before, after)
    num_before = workbench.num_requests
    workbench.type(" ")
    workbench.expect_nothing()
    workbench.request()
    workbench.expect_num_requests(num_before + num_requests + 1)


def test_words_are_offered_before_marks_that_the_editor_has_closed_and_in_code_if_that_is_set(
    workbench: Workbench,
) -> None:
    workbench.open(f"(“{SURE}", ".”)")
    workbench.type(" ")
    assert workbench.suggestion() == "head"
    workbench.press("Escape")
    assert workbench.request() == "head"  # as the sentence has ended
    workbench.configure(proseOnly=False)
    workbench.open(IN_CODE)
    workbench.type(" ")
    workbench.suggestion()


def test_a_request_offers_one_line_before_text_and_nothing_inside_a_word(workbench: Workbench) -> None:
    verse, after = "Roses are red,\nviolets are blue,\n", "as ever"  # more verses follow
    file = workbench.open(verse, after)
    line = workbench.request()
    workbench.press("Tab", "Control+s")
    until(lambda: file.read_text() == f"{verse}{line}{after}", PATIENCE_S, "the accepted line in the file")
    workbench.open("The old man opened the do", "or")
    num_requests = workbench.num_requests
    workbench.press("Alt+\\")
    workbench.expect_nothing()
    workbench.press("End")
    workbench.request()
    workbench.expect_num_requests(num_requests + 1)


def test_pauses_offer_ideas_after_the_pause(workbench: Workbench) -> None:
    workbench.configure(mode="pauses")
    workbench.open("")
    third_ideas = 'tercet_suggestions_total{action="shown",rank="2",strategy="sample"'
    num_requests, num_ideas = workbench.num_requests, metric(workbench.tercet, third_ideas)
    workbench.type(OPENING)
    workbench.suggestion()
    workbench.expect_num_requests(num_requests + 1)
    assert metric(workbench.tercet, third_ideas) == num_ideas + 1


def test_languages_are_a_setting(workbench: Workbench) -> None:
    for languages, offered, refused in ((None, ".txt", ".py"), (["python"], ".py", ".md")):
        workbench.configure(**({"languages": languages} if languages else {}))
        workbench.open(OPENING, suffix=refused)
        num_requests = workbench.num_requests
        workbench.press("Alt+\\")
        workbench.expect_nothing()
        workbench.open(OPENING, suffix=offered)
        workbench.request()
        workbench.expect_num_requests(num_requests + 1)


def test_typing_on_cancels_the_request_and_frees_its_sequences(workbench: Workbench) -> None:
    workbench.configure(mode="off", model="slow")
    workbench.open(OPENING)
    workbench.press("Alt+\\")
    in_engine = 'tercet_slot_in_flight_branches{slot="1"}'
    cancelled = 'tercet_branches_total{outcome="cancelled",slot="1"}'
    until(lambda: metric(workbench.tercet, in_engine), PATIENCE_S, "the request in the engine")
    workbench.type(".")
    until(lambda: not metric(workbench.tercet, in_engine), PATIENCE_S, "its sequences freed")
    assert metric(workbench.tercet, cancelled)
    expect(workbench.problem).to_have_count(0)


def test_line_ends_of_windows_change_nothing(workbench: Workbench) -> None:
    verse, predicted = f"The old man looked at the sea.\nHe sighed.\n\n{SURE}", []
    for end in ("\n", "\r\n"):
        workbench.open(verse.replace("\n", end))
        workbench.type(" ")
        predicted.append(workbench.suggestion())
    assert predicted[0] == predicted[1]


def test_a_long_document_is_cut(workbench: Workbench) -> None:
    """The server refuses bodies that are too large."""
    workbench.open("He looked at the sea and sighed.\n" * 60_000 + OPENING)
    workbench.request()


@pytest.mark.parametrize(
    ("settings", "key", "named"),
    [
        ({"url": f"http://127.0.0.1:{free_port()}/"}, None, 'the setting "tercet.url"'),
        ({"model": "none"}, None, 'the setting "tercet.model"'),
        ({}, "wrong", '"Tercet: Set API Key"'),
        ({}, "", '"Tercet: Set API Key"'),
    ],
    ids=["unreachable", "model", "wrong key", "no key"],
)
def test_a_problem_is_shown_once_with_what_mends_it_and_until_it_is_mended(
    workbench: Workbench, settings: dict[str, Any], key: str | None, named: str
) -> None:
    workbench.configure(**settings)
    if key is not None:
        workbench.pick("F1", ">Tercet: Set API Key", "Tercet: Set API Key")
        workbench.enter_key(key)
    workbench.open(OPENING)
    for _ in range(2):
        workbench.press("Alt+\\")
        workbench.page.wait_for_timeout(QUIET_MS)
        expect(workbench.problem).to_have_count(1)
        expect(workbench.problem).to_have_accessible_name(re.compile(re.escape(named)))
    workbench.problem.click()
    if key is None:
        expect(workbench.page.locator(".settings-editor .suggest-input-container")).to_contain_text("tercet.")
        workbench.configure()
    else:
        workbench.enter_key(workbench.key)
    expect(workbench.problem).to_have_count(0)
    workbench.open(OPENING)
    workbench.request()
