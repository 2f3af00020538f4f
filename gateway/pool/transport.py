"""HTTP/1.1 over a slot's Unix socket, as a transport for httpx.

httpx's own transport asks every idle connection of its pool whether it is still there, under one lock, before and
after each call, sets a timeout anew for each read, and parses in Python: with three branches at once that was half of
what the gateway computes for an answer. Here a call has a connection to itself, and llhttp reads the answer.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal

import httptools
import httpx

READ_BYTES = 1 << 16


class UnixTransport(httpx.BaseTransport):
    """A connection for each call under way; idle ones are kept for the next, the one used last first.

    Shared by all threads. A response's `network_stream` extension has the socket, as that of httpx's own transport.
    """

    def __init__(self, path: str, keepalive_expiry_s: float) -> None:
        self._path = path
        self._keepalive_expiry_s = keepalive_expiry_s
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """
        Raises:
            httpx.TransportError: unreachable, silent for longer than the request's `timeout` extension allows, or not
                understood.
        """
        timeout = request.extensions["timeout"]
        connection = self._send(_head(request) + request.read(), timeout)
        try:
            answer = _Answer()
            while not answer.has_head:
                answer.feed(connection.receive(timeout["read"]))
        except BaseException:
            connection.close()
            raise
        return httpx.Response(
            answer.status,
            headers=answer.headers,
            stream=_Body(self, connection, answer, timeout),
            extensions={"network_stream": connection},
        )

    def close(self) -> None:
        """Closes idle connections; calls under way are not ended by it."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _send(self, data: bytes, timeout: dict[str, float]) -> _Connection:
        """A connection on which `data` has been sent: an idle one whose peer is still there, or a new one."""
        while (connection := self._take()) is not None:
            try:
                connection.send(data, timeout["write"])
                return connection
            except httpx.WriteError:  # a Unix socket whose peer has hung up takes nothing
                continue
        connection = _Connection(self._path, timeout["connect"])
        connection.send(data, timeout["write"])
        return connection

    def _take(self) -> _Connection | None:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.idle_since < time.monotonic() - self._keepalive_expiry_s:
            connection.close()
            return None  # those below it have been idle for longer
        return connection

    def give_back(self, connection: _Connection) -> None:
        now = time.monotonic()
        connection.idle_since = now
        with self._lock:
            self._idle.append(connection)
            # What was used least lies first.
            is_old = now - self._idle[0].idle_since > self._keepalive_expiry_s
            old = self._idle.pop(0) if is_old else None
        if old is not None:
            old.close()


class _Connection:
    """One connection. Its socket blocks, and the kernel keeps its timeouts: one call where Python's own takes two."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._timeouts: dict[int, float] = {}
        self.idle_since = 0.0
        self._limit(socket.SO_SNDTIMEO, timeout_s)
        try:
            self._socket.connect(path)
        except BlockingIOError as error:
            self.close()
            raise httpx.ConnectTimeout(f"Nobody took the connection within {timeout_s:g} s.") from error
        except OSError as error:
            self.close()
            raise httpx.ConnectError(str(error)) from error

    def get_extra_info(self, info: Literal["socket"]) -> socket.socket:
        return self._socket

    def send(self, data: bytes, timeout_s: float) -> None:
        self._limit(socket.SO_SNDTIMEO, timeout_s)
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            self.close()
            raise httpx.WriteTimeout(f"The request was not read within {timeout_s:g} s.") from error
        except OSError as error:
            self.close()
            raise httpx.WriteError(str(error)) from error

    def receive(self, timeout_s: float) -> bytes:
        self._limit(socket.SO_RCVTIMEO, timeout_s)
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError as error:
            raise httpx.ReadTimeout(f"Nothing came for {timeout_s:g} s.") from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        if not data:
            raise httpx.RemoteProtocolError("The connection was closed before the answer was whole.")
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _limit(self, option: int, timeout_s: float) -> None:
        if self._timeouts.get(option) != timeout_s:
            fraction, seconds = math.modf(max(timeout_s, 1e-6))  # 0 would be no limit
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(1e6 * fraction)))
            self._timeouts[option] = timeout_s


class _Answer:
    """What has come of a response; llhttp calls its `on_` methods. One without a length or chunks is not understood."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._is_too_long = False
        self._is_kept_alive = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.is_whole = False

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    @property
    def leaves_connection(self) -> bool:
        """Whether another request may follow on the connection."""
        return self._is_kept_alive and not self._is_too_long

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise httpx.RemoteProtocolError(f"This is no HTTP/1.1: {error}") from error

    def take(self) -> bytes:
        """What has come of the body since the last call."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data

    def on_message_begin(self) -> None:
        self._is_too_long = self.is_whole

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_whole = True
        self._is_kept_alive = self._parser.should_keep_alive()  # it knows now, and forgets


class _Body(httpx.SyncByteStream):
    """The body as it comes. Closed when it has been read to its end, it leaves its connection to the next call.

    The `read` limit may be changed while it is read.
    """

    def __init__(
        self, transport: UnixTransport, connection: _Connection, answer: _Answer, timeout: dict[str, float]
    ) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._answer = answer
        self._timeout = timeout

    def __iter__(self) -> Iterator[bytes]:
        assert self._connection is not None
        while True:
            if data := self._answer.take():
                yield data
            elif self._answer.is_whole:
                return
            else:
                self._answer.feed(self._connection.receive(self._timeout["read"]))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._answer.leaves_connection:
                self._transport.give_back(connection)
            else:
                connection.close()


def _head(request: httpx.Request) -> bytes:
    """
    Raises:
        httpx.LocalProtocolError: a header would end its line, and begin another.
    """
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % header for header in request.headers.raw]
    head = b"\r\n".join([*lines, b"", b""])
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
        raise httpx.LocalProtocolError("A header has a line end in it.")
    return head
