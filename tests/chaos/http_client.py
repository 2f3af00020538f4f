"""A small blocking HTTP/1.1 client over raw sockets, and the judgement of its answers.

A client library costs more CPU time per request than the server under test, which shares the machine. It knows bytes,
sockets and the shape of Tercet's answers; it does not know who sends requests when.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import time
from typing import Any, NamedTuple

import httptools

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 180.0  # longer than any deadline of a request
# What is not read of a body would wait on another machine; here, to copy a megabyte takes the server's cores 1 ms.
SEND_BYTES = 64 << 10
PROBLEM_JSON = "application/problem+json"
# Statuses that promise the client another try, so that `Retry-After` must say when.
RETRYABLE = frozenset({429, 503})


class Answer(NamedTuple):
    """One request as its client saw it, in times of `time.monotonic()`. Status 0: the connection was lost; `body` then
    says how."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    started_at: float
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


class ResponseReader:
    """Parses one response, incrementally. `is_complete` is true after its last byte."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def feed(self, data: bytes) -> None:
        """
        Raises:
            httptools.HttpParserError: not HTTP.
        """
        self._parser.feed_data(data)

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def body(self) -> bytes:
        return b"".join(self._body)


def request_bytes(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """A request with a `Host`, and a `Content-Length` where it has a body."""
    return request_head(method, path, body, headers) + body


def request_head(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    """A request without its body, of which many need no copy then."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if body:
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def completion_request(
    context: str = "She opened the door, and", *, headers: dict[str, str] | None = None, **fields: Any
) -> bytes:
    """`POST /autocomplete`."""
    return request_bytes("POST", "/autocomplete", json.dumps({"context": context, **fields}).encode(), headers)


class Connection:
    """A persistent connection to a port of the loopback interface, used by one thread. It is opened again after it was
    lost, or closed by the server."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._port, self._tls = port, tls
        self._socket: socket.socket | None = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def exchange(self, request: bytes, body: bytes = b"") -> Answer:
        """Send a request, and then its body until an answer begins, as curl does; read the response. Never raises for
        what the server does."""
        started_at = time.monotonic()
        reader = ResponseReader()
        try:
            connection = self._open()
            connection.sendall(request, socket.MSG_MORE if body else 0)
            unsent, poller = memoryview(body), select.poll()
            poller.register(connection)
            while unsent and not poller.poll()[0][1] & select.POLLIN:
                unsent = unsent[connection.send(unsent) :]
            while not reader.is_complete:
                data = connection.recv(65536)
                if not data:
                    raise ConnectionResetError("closed before the end of the response")
                reader.feed(data)
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            return Answer(0, {}, f"{type(error).__name__}: {error}".encode(), started_at, time.monotonic())
        if reader.headers.get("connection", "").lower() == "close":
            self.close()
        return Answer(reader.status, reader.headers, reader.body, started_at, time.monotonic())

    def _open(self) -> socket.socket:
        """As a client library does: a connection that the server has closed while it was idle is not used again."""
        if self._socket is not None and select.select([self._socket], [], [], 0)[0]:
            self.close()
        if self._socket is None:
            self._socket = socket.create_connection((LOOPBACK, self._port), timeout=TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            if self._tls is not None:
                self._socket = self._tls.wrap_socket(self._socket, server_hostname=LOOPBACK)
        return self._socket


def exchange(port: int, request: bytes, body: bytes = b"") -> Answer:
    """One request on a connection of its own."""
    with Connection(port) as connection:
        return connection.exchange(request, body)


def find_fault(answer: Answer) -> str:
    """Why an answer of `POST /autocomplete` is not well-formed; "" if it is.

    Well-formed are: a 200 with sentences, and an error as problem+json of the same status, with `Retry-After` where
    the status asks the client to try again.
    """
    if answer.status == 0:
        return f"no answer ({answer.body.decode()})"
    try:
        document = answer.document()
    except ValueError:
        return f"{answer.status} whose body is not JSON"
    if answer.status == 200:
        return "" if document.get("sentences") else "200 without sentences"
    kind = answer.headers.get("content-type", "").partition(";")[0]
    if kind != PROBLEM_JSON or document.get("status") != answer.status:
        return f"{answer.status} that is not problem+json"
    if answer.status in RETRYABLE and not answer.headers.get("retry-after", "").isdigit():
        return f"{answer.status} without Retry-After"
    return ""
