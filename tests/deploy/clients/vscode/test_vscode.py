"""The VS Code extension, built, packaged, unpacked, and run in Node under a stand-in for VS Code."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.clients.plugins import build_vscode
from tests.browser.driver import OPENING
from tests.e2e.harness import Tercet, free_port, metric, until
from tests.editor_plugins import build_plugin, bundle_host, running_with_key
from tests.npm_package import NpmPackage


class Host:
    """The stand-in, in a process."""

    def __init__(self, script: Path, extension: Path) -> None:
        node = shutil.which("node")
        assert node is not None, "npm is here without node"
        command: list[str | Path] = [node, script, extension]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ids = itertools.count()

    def start(self, name: str, **fields: Any) -> int:
        """Send a command and do not wait for its result; returns its id."""
        assert self._process.stdin is not None
        number = next(self._ids)
        self._process.stdin.write(json.dumps({"id": number, "name": name, **fields}) + "\n")
        self._process.stdin.flush()
        return number

    def result(self, number: int) -> Any:
        """Wait for a command's result. The results of commands that ended before it are dropped."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer["id"] == number:
                return answer["result"]
        raise AssertionError(f"the host ended with status {self._process.wait()}")

    def call(self, name: str, **fields: Any) -> Any:
        return self.result(self.start(name, **fields))

    def complete(self, before: str, **fields: Any) -> list[str]:
        """The texts that the extension offers."""
        return [item["insertText"] for item in self.call("complete", before=before, **fields)]

    def set_key(self, key: str) -> None:
        """Run the command, and type the key into its input box."""
        self.call("execute", command="tercet.setKey", input=key)

    def close(self) -> int:
        """End the process; returns its exit status."""
        self._process.communicate(timeout=10)
        return self._process.returncode


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tercet, str]]:
    with running_with_key(tmp_path_factory.mktemp("t")) as server:
        yield server


@pytest.fixture
def tercet(server: tuple[Tercet, str]) -> Tercet:
    return server[0]


@pytest.fixture
def key(server: tuple[Tercet, str]) -> str:
    return server[1]


@pytest.fixture(scope="module")
def vsix(npm_package: NpmPackage, request: pytest.FixtureRequest) -> Path:
    return build_plugin("vscode", build_vscode, npm_package, request)


@pytest.fixture(scope="module")
def script(vsix: Path) -> Path:
    source = Path(__file__).with_name("vscode_host.ts")
    return bundle_host(vsix.parent, source, ["node", "vscode"], "--platform=node", "--format=esm")


@pytest.fixture
def host(vsix: Path, script: Path, tmp_path: Path) -> Iterator[Host]:
    """VS Code with the extension installed and not yet activated."""
    with zipfile.ZipFile(vsix) as archive:
        archive.extractall(tmp_path)
    host = Host(script, tmp_path / "extension")
    yield host
    assert host.close() == 0


@pytest.fixture
def editor(host: Host, tercet: Tercet, key: str) -> Host:
    """VS Code with the extension active, for the server under test."""
    host.call("configure", settings={"tercet.url": tercet.url})
    host.call("activate")
    host.set_key(key)
    return host


def test_the_package_has_what_vs_code_reads(vsix: Path) -> None:
    with zipfile.ZipFile(vsix) as archive:
        names = set(archive.namelist())
        manifest = json.loads(archive.read("extension/package.json"))
    assert {"extension.vsixmanifest", "[Content_Types].xml", "extension/extension.js", "extension/readme.md"} <= names
    assert not any("node_modules" in name or name.endswith(".ts") for name in names)
    assert f"-{manifest['version']}.vsix" in vsix.name


def test_a_request_yields_three_alternatives(editor: Host) -> None:
    items = editor.call("complete", before=OPENING, isExplicit=True)
    assert len({item["insertText"] for item in items}) == 3
    for item in items:
        assert item["range"]["start"] == item["range"]["end"] == {"line": 0, "character": len(OPENING)}


def test_live_mode_predicts_words_without_a_request(editor: Host) -> None:
    predicted = editor.complete("The old man shook his ")
    assert predicted
    # While the writer types one of them, it stays; the others that do not agree go.
    first = predicted[0]
    assert editor.complete("The old man shook his " + first[0])[0] == first[1:]


CODE = "a\n\n```\nThe old man shook his "


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, "The old man shook his ", " and sighed"),
        ({}, "(“The old man shook his ", ".”) and"),
        ({}, "The old man shook his", ""),  # a deletion
        ({}, CODE, ""),
        ({"tercet.mode": "off"}, OPENING, ""),
        ({"tercet.minUsefulness": 100}, "The old man shook his ", ""),
    ],
    ids=["mid-line", "after marks", "a deletion", "code", "off", "of little use"],
)
def test_nothing_is_offered_unasked_where_it_would_be_in_the_way(
    editor: Host, settings: dict[str, Any], before: str, after: str
) -> None:
    assert editor.complete("The old man shook his ")
    editor.call("configure", settings=settings)
    assert editor.complete(before, after=after) == []
    assert editor.complete(before, after=after, isExplicit=True)


def test_words_are_offered_before_marks_that_the_editor_has_closed_and_in_code_if_that_is_set(editor: Host) -> None:
    offered = editor.complete("(“The old man shook his ", after=".”)")
    assert offered
    assert not any(text != text.rstrip() for text in offered)
    editor.call("configure", settings={"tercet.proseOnly": False})
    assert editor.complete(CODE)


def test_nothing_is_offered_for_a_text_that_has_changed_meanwhile(editor: Host) -> None:
    number = editor.start("complete", before=OPENING, isExplicit=True)
    editor.call("change")
    assert editor.result(number) == []


def test_nothing_is_offered_inside_a_word(editor: Host) -> None:
    assert editor.complete("The old man opened the do", after="or", isExplicit=True) == []


def test_before_text_on_the_line_a_request_offers_one_line(editor: Host) -> None:
    offered = editor.complete("The old man looked at the ", after=" and sighed", isExplicit=True)
    assert offered
    assert not any("\n" in text for text in offered)


def test_pauses_offer_ideas_after_the_pause(editor: Host) -> None:
    editor.call("configure", settings={"tercet.mode": "pauses"})
    assert len(editor.complete(OPENING)) == 3


def test_languages_are_a_setting(editor: Host) -> None:
    assert editor.call("complete", before=OPENING, language="python") is None
    editor.call("configure", settings={"tercet.languages": ["python"]})
    assert editor.call("complete", before=OPENING, language="markdown") is None
    assert editor.complete(OPENING, language="python", isExplicit=True)


def test_an_acceptance_is_reported(editor: Host, tercet: Tercet) -> None:
    item = editor.call("complete", before=OPENING, isExplicit=True)[1]
    before = metric(tercet, "tercet_saved_characters_total")
    editor.call("execute", command=item["command"]["command"], args=item["command"]["arguments"])
    assert metric(tercet, "tercet_saved_characters_total") - before == len(item["insertText"])


def test_cancelling_aborts_the_request(editor: Host, tercet: Tercet) -> None:
    editor.call("configure", settings={"tercet.model": "slow"})
    completion = editor.start("complete", before=OPENING, isExplicit=True)
    in_engine = 'tercet_slot_in_flight_branches{slot="1"}'
    until(lambda: metric(tercet, in_engine), 10, "the request in the engine")
    editor.start("cancel")
    assert editor.result(completion) == []
    until(lambda: not metric(tercet, in_engine), 10, "its sequences freed")
    assert not editor.call("status")["isVisible"]


def test_line_ends_of_windows_change_nothing(editor: Host) -> None:
    verse = "The old man looked at the sea.{0}He sighed.{0}{0}The old man shook his "
    predicted = editor.complete(verse.format("\r\n"))
    assert predicted
    editor.complete("Forget them.")
    assert editor.complete(verse.format("\n")) == predicted


def test_a_long_document_is_cut_at_a_line(editor: Host) -> None:
    """The server refuses bodies that are too large."""
    document = "He looked at the sea and sighed.\n" * 60_000
    assert len(editor.complete(document + OPENING, isExplicit=True)) == 3


@pytest.mark.parametrize(
    ("settings", "wrong_key", "named"),
    [
        ({"tercet.url": f"http://127.0.0.1:{free_port()}/"}, "", 'the setting "tercet.url"'),
        ({"tercet.model": "none"}, "", 'the setting "tercet.model"'),
        ({}, "wrong", '"Tercet: Set API Key"'),
    ],
    ids=["unreachable", "model", "key"],
)
def test_a_problem_is_reported_once_with_what_mends_it_and_until_it_is_mended(
    editor: Host, tercet: Tercet, key: str, settings: dict[str, Any], wrong_key: str, named: str
) -> None:
    editor.call("configure", settings=settings)
    editor.set_key(wrong_key or key)
    for _ in range(2):
        assert editor.complete(OPENING, isExplicit=True) == []
    status = editor.call("status")
    assert (status["isVisible"], status["numShown"]) == (True, 1)
    assert named in status["tooltip"]
    assert (status["command"]["command"] == "tercet.setKey") == bool(wrong_key)
    editor.call("configure", settings={"tercet.url": tercet.url, "tercet.model": ""})
    editor.set_key(key)
    assert not editor.call("status")["isVisible"]
    assert len(editor.complete(OPENING, isExplicit=True)) == 3


def test_deactivation_leaves_nothing_registered(editor: Host) -> None:
    assert editor.call("deactivate") == {"commands": [], "hasProvider": False, "isVisible": False}
