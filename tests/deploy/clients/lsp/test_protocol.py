"""`tercet lsp` over real pipes, with messages that no editor should send."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types
from pygls.workspace import TextDocument

import deploy.clients.lsp.server  # noqa: F401 - it mends positions
from tests.lsp_client import start_lsp

INLINE: dict[str, Any] = {"textDocument": {"inlineCompletion": {}}}
AT_START = {"textDocument": {"uri": "file:///a.md"}, "position": {"line": 0, "character": 0}}
CONTEXT = {"context": {"triggerKind": 1}}


def framed(**fields: Any) -> bytes:
    body = json.dumps({"jsonrpc": "2.0"} | fields).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def request(number: int, method: str, **params: Any) -> bytes:
    return framed(id=number, method=method, params=params)


INITIALIZE = request(1, "initialize", processId=None, capabilities=INLINE)
SHUTDOWN, EXIT = framed(id=99, method="shutdown"), framed(method="exit")
OPEN = framed(
    method="textDocument/didOpen",
    params={"textDocument": {"uri": "file:///a.md", "languageId": "markdown", "version": 1, "text": "One"}},
)


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERCET_BIND": "127.0.0.1:9"}


def run(sent: bytes, environ: Mapping[str, str]) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status, the answers and standard error. Standard input stays open until the process ends."""
    with start_lsp(environ) as process:
        assert process.stdin
        process.stdin.write(sent)
        process.stdin.flush()
        try:
            status = process.wait(30)
        finally:
            process.kill()
        assert process.stdout
        assert process.stderr
        bodies = re.findall(r"(?<=\r\n\r\n)\{.*?\}(?=Content-|\Z)", process.stdout.read().decode())
        answers = [json.loads(body) for body in bodies]
        return status, answers, process.stderr.read().decode()


@pytest.mark.parametrize(("before", "status"), [(b"", 1), (INITIALIZE, 1), (INITIALIZE + SHUTDOWN, 0)])
def test_exit_has_status_0_only_after_shutdown(before: bytes, status: int, environ: dict[str, str]) -> None:
    assert run(before + EXIT, environ)[::2] == (status, "")


def test_the_server_ends_with_the_process_that_the_editor_names(environ: dict[str, str]) -> None:
    """Standard input stays open. The process is a zombie first."""
    with subprocess.Popen(["sleep", "1"]) as editor:
        initialize = request(1, "initialize", processId=editor.pid, capabilities={})
        status, [answer], log = run(initialize, environ)
        assert (status, answer["id"], log) == (1, 1, "")


INLINE_COMPLETION, COMMAND = "textDocument/inlineCompletion", "workspace/executeCommand"
UNUSABLE: list[tuple[bytes, int, int | None]] = [
    (b"Content-Length: -5\r\n\r\n{}", -32700, None),
    (b"Content-Length: five\r\n\r\n{}", -32700, None),
    (b"Content-Length: 2.5\r\n\r\n{}\n\n{}", -32700, None),
    (b"Content-Length: 99999999999\r\n\r\n{}", -32700, None),
    (b"Content-Type: application/json\r\n\r\n{}", -32700, None),
    (b"\r\n{}", -32700, None),
    (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", -32700, None),
    (b"\xff\x00" * 100_000 + b"\n", -32700, None),
    (b'Content-Length: 3\r\n\r\n{"a": 5}', -32700, None),
    (b"Content-Length: 2\r\n\r\n\xff{", -32700, None),
    (b"Content-Length: 100000\r\n\r\n" + b"[" * 100_000, -32700, None),
    (b"Content-Length: 2\r\n\r\n[]", -32600, None),
    (framed(id=5), -32600, 5),
    (framed(id=6, jsonrpc="1.0", method="foo"), -32600, 6),
    (framed(id=7, method=["foo"]), -32600, 7),
    (framed(id=[5], method="foo"), -32600, None),
    (framed(id=8, method="foo"), -32601, 8),
    (INITIALIZE, -32600, 1),
    (request(10, INLINE_COMPLETION), -32602, 10),
    (request(11, INLINE_COMPLETION, **CONTEXT, textDocument=3, position=[]), -32602, 11),
    (request(12, INLINE_COMPLETION, **CONTEXT, **AT_START | {"position": {"line": -1, "character": 0}}), -32602, 12),
    (request(13, INLINE_COMPLETION, **CONTEXT, **AT_START | {"position": {"line": 0, "character": -7}}), -32602, 13),
    (request(14, COMMAND, command="tercet.accepted", arguments=["a", "b", {}]), -32602, 14),
    (request(15, COMMAND, command="tercet.accepted"), -32602, 15),
]


def test_what_cannot_be_used_is_answered_and_the_next_message_too(environ: dict[str, str]) -> None:
    unanswered = framed(id=[], result=1) + framed(id="a", error=5) + framed(method="$/cancelRequest", params={"id": {}})
    sent = b"".join(bad + request(100 + place, "foo") for place, (bad, _, _) in enumerate(UNUSABLE))
    status, [_, *answers, last], log = run(INITIALIZE + unanswered + sent + SHUTDOWN + EXIT, environ)
    expected: list[tuple[int | None, int]] = []
    for place, (_, code, number) in enumerate(UNUSABLE):
        expected += [(number, code), (100 + place, -32601)]
    assert [(answer["id"], answer["error"]["code"]) for answer in answers] == expected
    assert "Traceback" not in log + json.dumps(answers)
    assert (last["id"], status) == (99, 0)


def test_requests_before_initialize_and_after_shutdown_are_refused(environ: dict[str, str]) -> None:
    early, late = request(5, INLINE_COMPLETION), request(6, INLINE_COMPLETION)
    _, answers, _ = run(early + INITIALIZE + SHUTDOWN + late + EXIT, environ)
    codes = [answer["error"]["code"] if "error" in answer else None for answer in answers]
    assert codes == [-32002, None, None, -32600]


def test_a_document_that_is_not_open_has_no_suggestions(environ: dict[str, str], tmp_path: Path) -> None:
    """Not even those for the file of its name, whose text the editor may have changed."""
    (tmp_path / "b.md").write_text("On the disk")
    on_disk = {**AT_START, "textDocument": {"uri": (tmp_path / "b.md").as_uri()}}
    close = framed(method="textDocument/didClose", params={"textDocument": AT_START["textDocument"]})
    asked = [request(5, INLINE_COMPLETION, **place, **CONTEXT) for place in (AT_START, on_disk)]
    status, answers, log = run(INITIALIZE + asked[0] + OPEN + close + asked[0] + asked[1] + SHUTDOWN + EXIT, environ)
    assert [answer["result"] for answer in answers[1:-1]] == [[], [], []]
    assert (status, log) == (0, "")


@pytest.mark.parametrize("line_end", ["", "\n", "\r\n", "\r"])
def test_a_character_beyond_the_end_of_a_line_is_its_end(line_end: str) -> None:
    document = TextDocument("file:///a.md", f"😀 One{line_end}")
    for character in (7, 50):
        found = document.position_from_client_units(types.Position(0, character))
        assert (found.line, found.character) == (0, 5)
    beyond = types.Range(types.Position(0, 3), types.Position(0, 7))
    document.apply_change(types.TextDocumentContentChangePartial(beyond, "two"))
    assert document.source == f"😀 two{line_end}"
