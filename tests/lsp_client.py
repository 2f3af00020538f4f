"""An editor's side of the Language Server Protocol, over the standard input and output of a real `tercet lsp`.

It knows the protocol's framing and the messages that an editor exchanges, and no editor: capabilities are given.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from queue import Queue
from types import TracebackType
from typing import Any, Self

from tests.e2e.harness import ROOT

URI = "file:///notes.md"
TIMEOUT_S = 30.0


def start_lsp(environ: Mapping[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    """`tercet lsp`, with pipes."""
    command, pipe = [sys.executable, "-m", "deploy", "lsp", *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=dict(environ), stdin=pipe, stdout=pipe, stderr=pipe)


class LspClient:
    """One editor with one document, which it sends whole at each change, or as a change of one place.

    Attributes:
        capabilities: what the server announced.
        shown: messages that the server asked to show, as (type, text).
    """

    def __init__(
        self,
        capabilities: Mapping[str, Any],
        *arguments: str,
        environ: Mapping[str, str],
        initial: Any = None,
        settings: Any = None,
    ) -> None:
        """
        Args:
            initial: the initialization options.
            settings: what the editor answers to `workspace/configuration`.
        """
        self.shown: list[tuple[int, str]] = []
        self.settings = settings
        self._ids = itertools.count(1)
        self._results: dict[int, Queue[dict[str, Any]]] = {}
        self._version = itertools.count(1)
        self._lock = threading.Lock()
        self._process = start_lsp(environ, *arguments)
        self.stderr = b""
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_stderr)]
        for thread in self._threads:
            thread.start()
        parameters = {
            "processId": None,
            "rootUri": None,
            "capabilities": capabilities,
            "initializationOptions": initial,
        }
        self.initialized = self.request("initialize", parameters)
        self.capabilities: dict[str, Any] = self.initialized["capabilities"]
        self.notify("initialized", {})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            assert self.close() == 0, self.stderr.decode()
        else:
            self._end()

    def close(self) -> int:
        """End the server as editors do; returns its exit status."""
        self.request("shutdown", None)
        self.notify("exit", None)
        return self._end()

    def _end(self) -> int:
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        self._process.stdin.close()
        status = self._process.wait(timeout=TIMEOUT_S)
        for thread in self._threads:
            thread.join()
        self._process.stdout.close()
        self._process.stderr.close()
        return status

    def start(self, method: str, params: Any) -> int:
        """Send a request and do not wait for its result; returns its id."""
        number = next(self._ids)
        self._results[number] = Queue()
        self._send({"id": number, "method": method, "params": params})
        return number

    def answer(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a request: an object with `result` or `error`."""
        return self._results[number].get(timeout=TIMEOUT_S)

    def request(self, method: str, params: Any) -> Any:
        """The result of a request, which must not fail."""
        answer = self.answer(self.start(method, params))
        assert "error" not in answer, answer
        return answer["result"]

    def notify(self, method: str, params: Any) -> None:
        self._send({"method": method, "params": params})

    def open(self, text: str) -> None:
        item = {"uri": URI, "languageId": "markdown", "version": next(self._version), "text": text}
        self.notify("textDocument/didOpen", {"textDocument": item})

    def change(self, text: str, span: Mapping[str, Any] | None = None) -> None:
        """Replace the document's text, or that of a range."""
        document = {"uri": URI, "version": next(self._version)}
        change = {"text": text} if span is None else {"range": span, "text": text}
        self.notify("textDocument/didChange", {"textDocument": document, "contentChanges": [change]})

    def start_inline(self, line: int, character: int, *, is_asked: bool = False) -> int:
        params = {"context": {"triggerKind": 1 if is_asked else 2}, **_at(line, character)}
        return self.start("textDocument/inlineCompletion", params)

    def inline(self, line: int, character: int, *, is_asked: bool = False) -> list[dict[str, Any]] | None:
        """The items that are offered inline; None: none, and what is shown may stay."""
        answer = self.answer(self.start_inline(line, character, is_asked=is_asked))
        assert "error" not in answer, answer
        found: list[dict[str, Any]] | None = answer["result"]
        return found

    def complete(self, line: int, character: int) -> list[dict[str, Any]]:
        """The items of the completion list."""
        result = self.request("textDocument/completion", {"context": {"triggerKind": 1}, **_at(line, character)})
        assert result["isIncomplete"]
        items: list[dict[str, Any]] = result["items"]
        return items

    def run(self, command: Mapping[str, Any]) -> None:
        """Run an item's command, as an editor does after it has inserted the item."""
        assert command["command"] in self.capabilities["executeCommandProvider"]["commands"]
        params = {"command": command["command"], "arguments": command["arguments"]}
        assert self.request("workspace/executeCommand", params) is None

    def _send(self, message: Mapping[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False).encode("utf-8", "surrogatepass")
        assert self._process.stdin
        with self._lock:
            self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout
        while head := self._process.stdout.readline():
            size = 0
            while head.strip():
                name, _, value = head.partition(b":")
                size = int(value) if name.lower() == b"content-length" else size
                head = self._process.stdout.readline()
            self._receive(json.loads(self._process.stdout.read(size)))
        for results in self._results.values():
            results.put({"error": f"the server has ended: {self.stderr.decode()}"})

    def _receive(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            self._results[message["id"]].put(message)
        elif message["method"] == "workspace/configuration":
            found = [self.settings for _ in message["params"]["items"]]
            self._send({"id": message["id"], "result": found})
        elif message["method"] == "window/showMessage":
            self.shown.append((message["params"]["type"], message["params"]["message"]))

    def _read_stderr(self) -> None:
        assert self._process.stderr
        for line in self._process.stderr:
            self.stderr += line


def _at(line: int, character: int) -> dict[str, Any]:
    return {"textDocument": {"uri": URI}, "position": {"line": line, "character": character}}


def applied(text: str, edit: Mapping[str, Any], encoding: str = "utf-16-le") -> str:
    """The text after an edit of one line, whose positions count units of this encoding."""
    unit = 2 if encoding == "utf-16-le" else 1
    lines = text.split("\n")
    start, end = edit["range"]["start"], edit["range"]["end"]
    assert start["line"] == end["line"]
    data = lines[start["line"]].encode(encoding)
    changed = data[: unit * start["character"]] + edit["newText"].encode(encoding) + data[unit * end["character"] :]
    lines[start["line"]] = changed.decode(encoding)
    return "\n".join(lines)
