"""HTTP/1.1 over a slot's Unix socket: a transport for httpx.

Why not `httpx.HTTPTransport(uds=…)`: its connection pool checks every idle connection under one lock before and after
each call, sets a socket timeout for each read, and parses with h11, in Python. Here each call has a connection to
itself, the kernel keeps the timeouts, and llhttp parses. Small POSTs to a local server, medians of seven interleaved
rounds on two cores of an AMD EPYC (httpx 0.28.1, httptools 0.9.0), milliseconds of this process's CPU time and of
latency:

                              httpx's transport         this one
                              CPU       p50             CPU       p50
    one call                  0.32      0.32            0.04      0.05
    three calls at once       1.15      1.19            0.30      0.31

A gateway computes for about 2 ms per answer of three branches, so httpx's own transport would add almost half of that.

It knows neither the internal protocol nor slots. What it assumes of httpx is tested in
tests/gateway/pool/test_transport.py.
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
    """One connection per call. Idle connections are kept and reused, the last used first. Thread-safe.

    As in httpx's own transport, the response's `network_stream` extension gives access to the socket.
    """

    def __init__(self, path: str, keepalive_expiry_s: float) -> None:
        """
        Args:
            path: of the socket to connect to; the URL's host is ignored.
            keepalive_expiry_s: how long an idle connection is kept.
        """
        self._path = path
        self._keepalive_expiry_s = keepalive_expiry_s
        # In the order in which they became idle.
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and read the response's head; its body is read as the caller iterates.

        The request's `timeout` extension must have `connect`, `write` and `read` in seconds, none of them None.
        `read` limits each read, and may be changed between the head and the body.

        Raises:
            httpx.TransportError: unreachable, timed out, or not a response in HTTP/1.1.
        """
        timeout = request.extensions["timeout"]
        connection = self._send(_encode_head(request) + request.read(), timeout)
        try:
            parser = _ResponseParser()
            while not parser.is_head_complete:
                parser.feed(connection.receive(timeout["read"]))
        except BaseException:
            connection.close()
            raise
        return httpx.Response(
            parser.status,
            headers=parser.headers,
            stream=_BodyStream(self, connection, parser, timeout),
            extensions={"network_stream": connection},
        )

    def close(self) -> None:
        """Close the idle connections; calls in progress continue."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def put_back(self, connection: _Connection) -> None:
        """Keep a connection for the next call, and close the oldest if it has expired."""
        now = time.monotonic()
        connection.idle_since = now
        with self._lock:
            self._idle.append(connection)
            is_expired = now - self._idle[0].idle_since > self._keepalive_expiry_s
            expired = self._idle.pop(0) if is_expired else None
        if expired is not None:
            expired.close()

    def _send(self, data: bytes, timeout: dict[str, float]) -> _Connection:
        """Send on an idle connection whose peer is still there, else on a new one. Returns the connection."""
        while (connection := self._take_idle()) is not None:
            try:
                connection.send(data, timeout["write"])
                return connection
            # A write to a Unix socket fails at once if the peer has closed it; the request has not been processed.
            except httpx.WriteError:
                continue
        connection = _Connection(self._path, timeout["connect"])
        connection.send(data, timeout["write"])
        return connection

    def _take_idle(self) -> _Connection | None:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.idle_since < time.monotonic() - self._keepalive_expiry_s:
            connection.close()
            return None  # all others have been idle for longer
        return connection


class _Connection:
    """One connection, also the `network_stream` of its responses.

    The socket blocks and the kernel keeps its timeouts: one system call per read, where a timeout of Python's takes
    two.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._timeouts_s: dict[int, float] = {}
        self.idle_since = 0.0
        self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
        try:
            self._socket.connect(path)
        except BlockingIOError as error:
            self.close()
            raise httpx.ConnectTimeout(f"Connect timed out after {timeout_s:g} s.") from error
        except OSError as error:
            self.close()
            raise httpx.ConnectError(str(error)) from error

    def get_extra_info(self, info: Literal["socket"]) -> socket.socket:
        return self._socket

    def send(self, data: bytes, timeout_s: float) -> None:
        self._set_timeout(socket.SO_SNDTIMEO, timeout_s)
        try:
            self._socket.sendall(data)
        except BlockingIOError as error:
            self.close()
            raise httpx.WriteTimeout(f"Write timed out after {timeout_s:g} s.") from error
        except OSError as error:
            self.close()
            raise httpx.WriteError(str(error)) from error

    def receive(self, timeout_s: float) -> bytes:
        self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError as error:
            raise httpx.ReadTimeout(f"Read timed out after {timeout_s:g} s.") from error
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
        if not data:
            raise httpx.RemoteProtocolError("The peer closed the connection before the response was complete.")
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _set_timeout(self, option: int, timeout_s: float) -> None:
        if self._timeouts_s.get(option) != timeout_s:
            fraction, seconds = math.modf(max(timeout_s, 1e-6))  # 0 would mean no timeout
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(1e6 * fraction)))
            self._timeouts_s[option] = timeout_s


class _ResponseParser:
    """Parses one response; llhttp calls the `on_` methods.

    Bodies need a length or chunks: the end of the connection is always an error, never the end of a body.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body_parts: list[bytes] = []
        self._has_excess_data = False
        self._is_kept_alive = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_head_complete = False
        self.is_complete = False

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    @property
    def is_connection_reusable(self) -> bool:
        return self._is_kept_alive and not self._has_excess_data

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise httpx.RemoteProtocolError(f"Not a response in HTTP/1.1: {error}") from error

    def take_body(self) -> bytes:
        """The part of the body that has been parsed since the last call."""
        data = b"".join(self._body_parts)
        self._body_parts.clear()
        return data

    def on_message_begin(self) -> None:
        self._has_excess_data = self.is_complete

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_head_complete = True

    def on_body(self, body: bytes) -> None:
        self._body_parts.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True
        self._is_kept_alive = self._parser.should_keep_alive()  # llhttp resets it after this callback


class _BodyStream(httpx.SyncByteStream):
    """A response's body, read from the connection as it is iterated.

    Closed after a complete response, it puts the connection back for the next call; closed earlier, it closes it.
    """

    def __init__(
        self, transport: UnixTransport, connection: _Connection, parser: _ResponseParser, timeout: dict[str, float]
    ) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._parser = parser
        self._timeout = timeout

    def __iter__(self) -> Iterator[bytes]:
        assert self._connection is not None
        while True:
            if data := self._parser.take_body():
                yield data
            elif self._parser.is_complete:
                return
            else:
                self._parser.feed(self._connection.receive(self._timeout["read"]))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._parser.is_connection_reusable:
                self._transport.put_back(connection)
            else:
                connection.close()


def _encode_head(request: httpx.Request) -> bytes:
    """
    Raises:
        httpx.LocalProtocolError: a header contains a line break, which would start another header.
    """
    lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s" % header for header in request.headers.raw]
    head = b"\r\n".join([*lines, b"", b""])
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1:
        raise httpx.LocalProtocolError("A header contains a line break.")
    return head
