"""The messages between editor and language server, and the answer to each that cannot be used.

pygls has the protocol's methods and types. Its reader leaves unanswered what it cannot read, and loses the messages
after a bad header; its positions beyond the end of a line are not those of LSP. This module knows no suggestion.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lsprotocol import types
from pygls import exceptions as errors
from pygls.io_ import StdoutWriter
from pygls.protocol import LanguageServerProtocol
from pygls.workspace import PositionCodec, ServerTextPosition, TextDocument

MAX_MESSAGE_BYTES = 64 << 20  # editors send a document whole when they open it
MAX_LINE_BYTES = 64 << 10
PARENT_POLL_S = 1.0

# At the end of a line: after a bad header follows a body of unknown length, which no line break ends.
_CONTENT_LENGTH = re.compile(rb"(?<!-)content-length:[ \t]*([0-9]{1,18})[ \t]*\r?\n\Z", re.IGNORECASE)
_FIELD = re.compile(rb"[!-9;-~]+:")


def read_messages(stream: BinaryIO) -> Iterator[bytes | errors.JsonRpcException]:
    """The bodies of the messages in a stream, until it ends. An error for each header that has no usable length: what
    follows it is skipped, up to the next header that has one."""
    num_bytes, is_lost = -1, False
    while line := stream.readline(MAX_LINE_BYTES):
        if found := _CONTENT_LENGTH.search(line):
            num_bytes, is_lost = int(found[1]), False
        elif 0 <= num_bytes <= MAX_MESSAGE_BYTES and not line.strip():
            yield stream.read(num_bytes)
            num_bytes = -1
        elif not is_lost and not (_FIELD.match(line) and line.strip()):
            num_bytes, is_lost = -1, True
            yield errors.JsonRpcParseError(f"A header has no Content-Length of 0 to {MAX_MESSAGE_BYTES}")


class Protocol(LanguageServerProtocol):
    """The protocol, with an answer to each request."""

    def run(self) -> None:
        """Serve standard input and output until they end.

        Raises:
            SystemExit: the editor has sent `exit`; the status is 1 without `shutdown` before.
        """
        self.set_writer(StdoutWriter(sys.stdout.buffer))
        with suppress(BrokenPipeError, KeyboardInterrupt):
            asyncio.run(self._serve(read_messages(sys.stdin.buffer)))

    async def end_with(self, pid: int) -> None:
        """End this process when that one has ended."""
        while _is_alive(pid):
            await asyncio.sleep(PARENT_POLL_S)
        os._exit(0 if self._shutdown else 1)  # Python's own way waits for the thread that reads

    async def _serve(self, messages: Iterator[bytes | errors.JsonRpcException]) -> None:
        read = asyncio.get_running_loop().run_in_executor
        try:
            while (message := await read(None, next, messages, None)) is not None:
                self._receive(message)
        finally:
            self.writer = None  # nothing reads the answers to requests that end now

    def _receive(self, body: bytes | errors.JsonRpcException) -> None:
        try:
            message = json.loads(body) if isinstance(body, bytes) else body
        except (ValueError, RecursionError):
            message = errors.JsonRpcParseError()
        if isinstance(message, errors.JsonRpcException):
            self._refuse(None, message)
            return
        fields = message if isinstance(message, dict) else {}
        number, method = fields.get("id"), fields.get("method")
        number = number if type(number) in {int, str} else None
        is_answer = "method" not in fields and not {"result", "error"}.isdisjoint(fields)
        is_valid = fields.get("jsonrpc") == self.VERSION and isinstance(method, str)
        is_initialized = self._workspace is not None
        if not is_answer and (not is_valid or (number is None and "id" in fields)):
            self._refuse(number, errors.JsonRpcInvalidRequest())
        elif number is not None and is_valid and (self._shutdown or is_initialized == (method == types.INITIALIZE)):
            refusal = errors.JsonRpcInvalidRequest if is_initialized else errors.JsonRpcServerNotInitialized
            self._refuse(number, refusal())
        else:
            has_params = is_answer or fields.get("params") is not None
            self._handle(fields if has_params else fields | {"params": {}}, number)

    def _handle(self, fields: dict[str, Any], number: int | str | None) -> None:
        try:
            self.handle_message(self.structure_message(fields))
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - pygls and cattrs raise many where the types are not LSP's
            if "method" not in fields:  # what waits for this answer must not wait longer
                self._handle_response(number or "", error=types.ResponseError(errors.JsonRpcInternalError.CODE, ""))
            elif number is not None:
                self._refuse(number, errors.JsonRpcInvalidParams())
            else:
                self._server.report_server_error(error, errors.JsonRpcException)

    def _refuse(self, number: int | str | None, error: errors.JsonRpcException) -> None:
        # As an object: pygls leaves out an id that is null.
        found = {"code": error.code, "message": error.message}
        self._send_data({"jsonrpc": self.VERSION, "id": number, "error": found})
        self._server.report_server_error(error, errors.JsonRpcException)

    def _send_response(
        self, msg_id: int | str, result: Any | None = None, error: types.ResponseError | None = None
    ) -> None:
        """Leave out the traceback and the message of an unexpected error, which may hold text of a document."""
        if error is not None:
            is_unexpected = error.code == errors.JsonRpcInternalError.CODE
            error = types.ResponseError(error.code, "Internal Error" if is_unexpected else error.message)
        super()._send_response(msg_id, result, error)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A zombie has ended, and its parent has not asked for its status.
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # another user's process, or a system without /proc
        return True


# pygls also ends lines at form feeds, U+2028 and others. Editors do not, and count lines differently then.
TextDocument.lines = property(lambda document: tuple(io.StringIO(document.source, newline="")))  # type: ignore[assignment,method-assign]


def position_in_text(codec: PositionCodec, lines: Sequence[str], position: types.Position) -> types.Position:
    """The position, or the end of the line or text that it is beyond."""
    last = len(lines) - (1 if lines and not lines[-1].endswith(("\n", "\r")) else 0)
    number = min(position.line, last)
    end = codec.client_num_units(lines[number].rstrip("\r\n")) if number < len(lines) else 0
    return types.Position(number, min(position.character, end) if number == position.line else end)


def _position_from_client_units(
    codec: PositionCodec, lines: Sequence[str], position: types.Position
) -> ServerTextPosition:
    """pygls takes the character before the end of a line for one beyond it, or its line break."""
    return _pygls_position(codec, lines, position_in_text(codec, lines, position))


_pygls_position = PositionCodec.position_from_client_units
PositionCodec.position_from_client_units = _position_from_client_units  # type: ignore[assignment,method-assign]
