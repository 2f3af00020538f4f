"""HTTP/1.1 to a worker over a Unix socket, TCP or TLS: a transport for httpx.

Why not `httpx.HTTPTransport`: its connection pool checks every idle connection under one lock before and after each
call, sets a socket timeout for each read, and parses with h11, in Python. Here each call has a connection to itself,
the kernel keeps the timeouts of plain sockets, and llhttp parses. Small POSTs to a local server over a Unix socket,
medians of seven interleaved rounds on two cores of an AMD EPYC (httpx 0.28.1, httptools 0.9.0), milliseconds of this
process's CPU time and of latency:

                              httpx's transport         this one
                              CPU       p50             CPU       p50
    one call                  0.32      0.32            0.04      0.05
    three calls at once       1.15      1.19            0.30      0.31

A gateway computes for about 2 ms per answer of three branches, so httpx's own transport would add almost half of that.

It knows neither the internal protocol nor slots. A way to connect is an `Address`; what follows is the same for all.
"""

from __future__ import annotations

import math
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import httptools
import httpx

from shared.certificates import ADDRESS_MISMATCH, EXPIRED, NAME_MISMATCH

READ_BYTES = 1 << 16
# Bytes of a response's head, and of what may come between two parts of its body: sizes and extensions of chunks,
# trailers. A worker's head has 200 bytes.
MAX_HEAD_BYTES = 1 << 16


class UntrustedPeer(httpx.ConnectError):
    """The peer's certificate was refused, or it does not speak TLS. It will be so until an operator acts."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket.

    Attributes:
        hides_close: a write succeeds although the peer has closed the connection; only the next read fails.
    """

    path: str
    hides_close: bool = False

    def connect(self, timeout_s: float) -> socket.socket:
        """
        Raises:
            httpx.ConnectTimeout, httpx.ConnectError: there is no connection.
        """
        try:
            sock = socket.socket(socket.AF_UNIX)
        except OSError as error:  # no descriptor is left
            raise _connect_error(error, timeout_s) from error
        try:
            _set_kernel_timeout(sock, socket.SO_SNDTIMEO, timeout_s)
            sock.connect(self.path)
        except OSError as error:
            sock.close()
            raise _connect_error(error, timeout_s) from error
        return sock


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port of another machine, with TLS or without.

    Attributes:
        address: an IP address.
        host: the name that the peer's certificate must have.
        tls_context: TLS context of a new connection. None for no TLS.
    """

    address: str
    port: int
    host: str = ""
    tls_context: Callable[[], ssl.SSLContext] | None = None
    hides_close: bool = True

    def connect(self, timeout_s: float) -> socket.socket:
        """As `UnixAddress.connect`. Each of the two handshakes may take `timeout_s`.

        Raises:
            UntrustedPeer: its certificate was refused.
        """
        try:
            sock = socket.create_connection((self.address, self.port), timeout_s)
        except OSError as error:
            raise _connect_error(error, timeout_s) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls_context is not None:
                return self.tls_context().wrap_socket(sock, server_hostname=self.host)
            sock.settimeout(None)  # from now on the kernel keeps the timeouts
        except OSError as error:
            sock.close()
            raise _connect_error(error, timeout_s) from error
        except BaseException:
            sock.close()
            raise
        return sock


Address: TypeAlias = UnixAddress | TcpAddress


class Transport(httpx.BaseTransport):
    """One connection per call. Idle connections are kept and reused, the last used first. Thread-safe.

    As in httpx's own transport, the response's `network_stream` extension gives access to the socket.
    """

    def __init__(self, address: Address, keepalive_expiry_s: float) -> None:
        """
        Args:
            address: where to connect to; a URL's host is ignored.
            keepalive_expiry_s: how long an idle connection is kept.
        """
        self._address = address
        self._keepalive_expiry_s = keepalive_expiry_s
        # In the order in which they became idle.
        self._idle: list[_Connection] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and read the response's head; its body is read as the caller iterates.

        The request's `timeout` extension must have `connect`, `write` and `read` in seconds, none of them None.
        `read` limits each read of the body, and all reads of the head together; `until` is the time of
        `time.monotonic()` after which no further read of the body begins. Both may be changed between the reads. The
        extension `hold`, if there is one, is called with the socket of each connection before the request is sent by
        it.

        Raises:
            httpx.TransportError: unreachable, timed out, or not a response in HTTP/1.1. `UntrustedPeer` is one of them.
        """
        timeout: dict[str, float] = request.extensions["timeout"]
        hold: Callable[[socket.socket], None] | None = request.extensions.get("hold")
        assert isinstance(request.stream, httpx.SyncByteStream)
        data = b"".join((_encode_head(request), *request.stream))
        while (kept := self._take_idle()) is not None:
            try:
                kept.send(data, timeout["write"], hold)
            except httpx.WriteError:
                continue  # the peer has closed it; the request has not been processed
            try:
                return self._read_head(kept, timeout)
            except (httpx.ReadError, httpx.RemoteProtocolError):
                # The peer has closed the kept connection, if nothing of a response has arrived.
                if not self._address.hides_close or kept.has_received:
                    raise
                break
        connection = _Connection(self._address.connect(timeout["connect"]))
        connection.send(data, timeout["write"], hold)
        return self._read_head(connection, timeout)

    def close(self) -> None:
        """Close the idle connections; those of calls in progress are closed when the calls end."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def put_back(self, connection: _Connection) -> None:
        """Keep a connection for the next call, and close the oldest if it has expired."""
        now = time.monotonic()
        connection.idle_since = now
        with self._lock:
            excess = connection if self._is_closed else None
            if excess is None:
                self._idle.append(connection)
                if now - self._idle[0].idle_since > self._keepalive_expiry_s:
                    excess = self._idle.pop(0)
        if excess is not None:
            excess.close()

    def _take_idle(self) -> _Connection | None:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None and connection.idle_since < time.monotonic() - self._keepalive_expiry_s:
            connection.close()
            return None  # all others have been idle for longer
        return connection

    def _read_head(self, connection: _Connection, timeout: dict[str, float]) -> httpx.Response:
        parser, num_bytes, until = connection.parser, 0, time.monotonic() + timeout["read"]
        try:
            connection.has_received = False
            parser.begin()
            while not parser.is_head_complete:
                if num_bytes > MAX_HEAD_BYTES:
                    raise httpx.RemoteProtocolError(f"The response's head is longer than {MAX_HEAD_BYTES} bytes.")
                data = connection.receive(until - time.monotonic() if num_bytes else timeout["read"])
                num_bytes += len(data)
                parser.feed(data)
        except BaseException:
            connection.close()
            raise
        stream = _BodyStream(self, connection, parser, timeout)
        return httpx.Response(parser.status, stream=stream, extensions={"network_stream": connection})


class _BodyStream(httpx.SyncByteStream):
    """A response's body, read from the connection as it is iterated.

    Closed after the end of the body, it keeps the connection for the next call; closed earlier, it closes it.
    """

    __slots__ = ("_connection", "_parser", "_timeout", "_transport")

    def __init__(
        self, transport: Transport, connection: _Connection, parser: _ResponseParser, timeout: dict[str, float]
    ) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._parser = parser
        self._timeout = timeout

    def __iter__(self) -> Iterator[bytes]:
        """
        Raises:
            httpx.TransportError: the body is not complete.
        """
        assert self._connection is not None
        num_bytes = 0  # since the last part of the body
        while True:
            if data := self._parser.take_body():
                num_bytes = 0
                yield data
            elif self._parser.is_complete:
                return
            elif num_bytes > MAX_HEAD_BYTES:
                raise httpx.RemoteProtocolError("The response's chunks have more than their data.")
            elif time.monotonic() >= self._timeout.get("until", math.inf):
                raise httpx.ReadTimeout("The response was not complete in time.")
            else:
                data = self._connection.receive(self._timeout["read"])
                num_bytes += len(data)
                self._parser.feed(data)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._parser.is_connection_reusable:
                self._transport.put_back(connection)
            else:
                connection.close()


class _Connection:
    """One connection, also the `network_stream` of its responses.

    A plain socket blocks and the kernel keeps its timeouts: one system call per read, where a timeout of Python's takes
    two. A TLS socket would read on after a timeout of the kernel's, so there Python keeps them.
    """

    __slots__ = ("_is_tls", "_socket", "_timeouts_s", "has_received", "idle_since", "parser")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._timeouts_s: dict[int | None, float] = {}
        self.idle_since = 0.0
        self.has_received = False
        self.parser = _ResponseParser()

    def get_extra_info(self, info: Literal["socket"]) -> socket.socket:
        return self._socket

    def send(self, data: bytes, timeout_s: float, hold: Callable[[socket.socket], None] | None = None) -> None:
        """
        Args:
            hold: gets the socket first; what it raises closes the connection.

        Raises:
            httpx.WriteTimeout, httpx.WriteError: it is closed then.
        """
        if hold is not None:
            try:
                hold(self._socket)
            except BaseException:
                self.close()
                raise
        try:
            self._set_timeout(socket.SO_SNDTIMEO, timeout_s)  # fails on macOS if the peer has closed
            self._socket.sendall(data)
        except (BlockingIOError, TimeoutError) as error:
            self.close()
            raise httpx.WriteTimeout(f"Write timed out after {timeout_s:g} s.") from error
        except OSError as error:
            self.close()
            raise httpx.WriteError(_reason(error)) from error

    def receive(self, timeout_s: float) -> bytes:
        try:
            self._set_timeout(socket.SO_RCVTIMEO, timeout_s)
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, TimeoutError) as error:
            raise httpx.ReadTimeout(f"Read timed out after {timeout_s:g} s.") from error
        except OSError as error:
            raise httpx.ReadError(_reason(error)) from error
        if not data:
            raise httpx.RemoteProtocolError("The peer closed the connection before the response was complete.")
        self.has_received = True
        return data

    def close(self) -> None:
        with suppress(OSError):
            self._socket.close()

    def _set_timeout(self, option: int, timeout_s: float) -> None:
        kept = option if not self._is_tls else None  # Python has one timeout for both directions
        if self._timeouts_s.get(kept) == timeout_s:
            return
        self._timeouts_s[kept] = timeout_s
        if self._is_tls:
            self._socket.settimeout(max(timeout_s, 1e-6))  # 0 would mean a socket that does not block
        else:
            _set_kernel_timeout(self._socket, option, timeout_s)


class _ResponseParser:
    """Parses the responses of a connection, one after the other; llhttp calls the `on_` methods.

    Bodies need a length or chunks: the end of the connection is always an error, never the end of a body.
    """

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body_parts: list[bytes] = []

    def begin(self) -> None:
        """Expect a response."""
        self._body_parts.clear()
        self._has_excess_data = self._is_kept_alive = self.is_head_complete = self.is_complete = False

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

    def on_headers_complete(self) -> None:
        self.is_head_complete = True

    def on_body(self, body: bytes) -> None:
        self._body_parts.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True
        self._is_kept_alive = self._parser.should_keep_alive()  # llhttp resets it after this callback


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


def _set_kernel_timeout(sock: socket.socket, option: int, timeout_s: float) -> None:
    fraction, seconds = math.modf(max(timeout_s, 1e-6))  # 0 would mean no timeout
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(1e6 * fraction)))


def _connect_error(error: OSError, timeout_s: float) -> httpx.TransportError:
    """The error with a text for operators, without numbers of Python's and OpenSSL's."""
    if isinstance(error, BlockingIOError | TimeoutError):
        return httpx.ConnectTimeout(f"Connect timed out after {timeout_s:g} s.")
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in {NAME_MISMATCH, ADDRESS_MISMATCH}:
            return UntrustedPeer("The certificate of the worker is for another name than TERCET_POOL has.")
        if error.verify_code == EXPIRED:
            return UntrustedPeer("The certificate of the worker has expired.")
        return UntrustedPeer(
            f"The certificate of the worker is not trusted ({error.verify_message}): TERCET_POOL_CA names the "
            "authorities."
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return UntrustedPeer(f"The worker does not speak TLS, or none in common ({error.reason}).")
    return httpx.ConnectError(_reason(error))


def _reason(error: OSError) -> str:
    return error.strerror or "The connection failed."
