"""What the language server offers for texts that others change, with a server whose answers are chosen."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.clients.lsp.test_protocol import INLINE
from tests.e2e.harness import until
from tests.gateway.pool.helpers import respond, serving_requests
from tests.lsp_client import URI, LspClient

TEXT = " sea.\nIt was"


class Editor(LspClient):
    """An editor, and what its server has received.

    Attributes:
        may_answer: completions wait for it.
    """

    requests: list[dict[str, object]]
    may_answer: threading.Event


@pytest.fixture(params=[INLINE, {}], ids=["inline", "list"])
def editor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Editor]:
    received: list[dict[str, object]] = []
    may_answer = threading.Event()
    may_answer.set()

    def answer(connection: socket.socket, sent: bytes) -> None:
        if sent.startswith(b"POST"):
            received.append(json.loads(sent.partition(b"\r\n\r\n")[2]))
        if sent.startswith(b"POST /autocomplete"):
            may_answer.wait(30)
        respond(connection, 200, json.dumps({"id": "a", "slots": [], "sentences": [{"value": TEXT}]}).encode())

    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with (
        serving_requests(answer) as server,
        Editor(request.param, "--url", f"http://{server.address}", environ=environ) as client,
    ):
        client.requests, client.may_answer = received, may_answer
        yield client


def start(editor: Editor, line: int, character: int) -> int:
    if "inlineCompletionProvider" in editor.capabilities:
        return editor.start_inline(line, character, is_asked=True)
    position = {"textDocument": {"uri": URI}, "position": {"line": line, "character": character}}
    return editor.start("textDocument/completion", position)


def raw_items(editor: Editor, number: int) -> list[dict[str, Any]]:
    result = editor.answer(number)["result"] or []
    found: list[dict[str, Any]] = result if isinstance(result, list) else result["items"]
    return found


def items(editor: Editor, number: int) -> list[tuple[str, Any]]:
    """The texts to insert, and the commands."""
    found = raw_items(editor, number)
    return [(item.get("insertText") or item["textEdit"]["newText"], item["command"]) for item in found]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_line_ends_are_those_of_the_document(editor: Editor, line_end: str) -> None:
    editor.open(f"One{line_end}the{line_end}{line_end}end")
    for line in (0, 1):
        text, command = items(editor, start(editor, line, 3))[0]
        assert text.endswith(TEXT.replace("\n", line_end))
    assert [request["context"] for request in editor.requests] == ["One", "One\nthe"]
    editor.run(command)
    assert editor.requests[-1]["characters"] == len(TEXT)


@pytest.mark.parametrize(("text", "line", "character"), [("A\nthe", 1, 50), ("A\nthe", 9, 0), ("A\nthe\nB", 1, 4)])
def test_a_position_beyond_the_end_of_a_line_is_its_end(editor: Editor, text: str, line: int, character: int) -> None:
    editor.open(text)
    [item] = raw_items(editor, start(editor, line, character))
    span = item.get("range") or item["textEdit"]["range"]
    first = 3 if "range" in item else 0  # a list replaces the word
    assert span == {"start": {"line": 1, "character": first}, "end": {"line": 1, "character": 3}}
    assert editor.requests[0]["context"] == "A\nthe"


@pytest.mark.parametrize("change", ["The", "tha", "the end", "", None])
def test_nothing_is_offered_for_a_text_that_has_changed_meanwhile(editor: Editor, change: str | None) -> None:
    """None: the document is closed."""
    editor.open("the")
    editor.may_answer.clear()
    number = start(editor, 0, 3)
    until(lambda: editor.requests, 10, "the request")
    if change is None:
        editor.notify("textDocument/didClose", {"textDocument": {"uri": URI}})
    else:
        editor.change(change)
    editor.run({"command": "tercet.accepted", "arguments": ["a", 0, 0]})  # the change has been read
    editor.may_answer.set()
    assert items(editor, number) == []
