"""A worker's TCP port (`TERCET_POOL_BIND`): TLS, the key of each request, and bounds on what clients without one hold.

A private Unix socket needs none of this. A port can be reached by any machine that the firewall lets through, so a
connection that has shown no key ends after seconds, and all of them together hold few threads. Only the routes of the
internal protocol are served, and two without a key for the probes of orchestrators. This module knows gunicorn's
connections and the heads of requests, no model and no service.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
from gunicorn import util
from gunicorn.workers.gthread import TConn

from shared import wire
from shared.errors import PROBLEM_JSON, MethodNotAllowed, NotFound, TercetError, Unauthorized
from shared.masters.startup import PortAccess, ServerTls
from shared.pool_keys import is_pool_key
from shared.sockets import TCP_KEEPIDLE
from shared.watched_files import WatchedFiles

# From the accepting of a connection to its first request with a key. A handshake across the world takes half a second.
ENTRY_S = 5.0
# Connections without a key that are open at a time; more are closed as they come.
MAX_STRANGERS = 256
# Threads that they may hold at a time.
ENTRY_THREADS = 4
# A connection whose peer acknowledges nothing for this time is closed by the kernel: the machine, or the way to it, is
# gone. Idle connections are probed.
SILENCE_S = 10
PROBE_PERIOD_S = 5
# How long and how much of a refused body is read from a client that still sends, so that it gets the refusal.
LINGER_S, LINGER_BYTES = 0.5, 65536

OPEN_ROUTES = frozenset({"/health/live", "/health/ready"})
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
log = structlog.get_logger()


class TcpPort:
    """The port of one worker. Thread-safe."""

    def __init__(self, access: PortAccess, on_room: Callable[[], None]) -> None:
        """
        Args:
            on_room: called, from any thread, when `next_waiting` may have a connection.
        """
        self._access = access
        _ = access.keys.value  # it may be of the master's start; from now on a thread reads the file
        self._on_room = on_room
        self._strangers: set[TcpConnection] = set()
        self._known: dict[TcpConnection, str] = {}  # with the last `Authorization` that was valid
        self._waiting: deque[TcpConnection] = deque()
        self._num_entering = 0
        self._lock = threading.Lock()

    def connection(self, cfg: Any, sock: socket.socket, client: Any, server: Any) -> TcpConnection | None:
        """A connection that was accepted; None if there are too many that have shown no key: it is closed."""
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS:
                util.close(sock)
                return None
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE_S)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, TCP_KEEPIDLE, PROBE_PERIOD_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_PERIOD_S)
            connection = TcpConnection(self, cfg, sock, client, server, self._access.tls)
            self._strangers.add(connection)
            return connection

    def try_enter(self, connection: TcpConnection) -> bool:
        """Whether a thread may handle the connection now; else `next_waiting` returns it later."""
        with self._lock:
            if connection not in self._strangers:
                return True
            if self._num_entering >= ENTRY_THREADS:
                self._waiting.append(connection)
                return False
            self._num_entering += 1
            connection.is_entering = True
            return True

    def next_waiting(self) -> TcpConnection | None:
        """A connection that waited, and that a thread may handle now."""
        with self._lock:
            if not self._waiting or self._num_entering >= ENTRY_THREADS:
                return None
            connection = self._waiting.popleft()
            self._num_entering += 1
            connection.is_entering = True
            return connection

    def leave(self, connection: TcpConnection) -> None:
        """The connection's thread is free, or holds it by right of a key. May be repeated."""
        with self._lock:
            has_room = connection.is_entering
            if has_room:
                connection.is_entering = False
                self._num_entering -= 1
            has_room = has_room and bool(self._waiting)
        if has_room:
            self._on_room()

    def forget(self, connection: TcpConnection) -> None:
        """The connection is no stranger's any more."""
        self.leave(connection)
        with self._lock:
            self._strangers.discard(connection)

    def discard(self, connection: TcpConnection) -> None:
        """The connection is closed."""
        self.forget(connection)
        self._known.pop(connection, None)

    def end_late(self) -> None:
        """End the connections that have shown no key in time: their threads' reads and writes fail."""
        now = time.monotonic()
        with self._lock:
            for connection in self._strangers:
                if now > connection.ends_at:
                    connection.end()

    def knows(self, connection: TcpConnection, authorization: bytes) -> bool:
        """Whether a connection has shown a key, and this request has one too."""
        value = authorization.decode("latin-1")
        if connection not in self._known or not is_pool_key(value, self._access.keys.value):
            return False
        self._known[connection] = value
        return True

    def _end_refused(self, client: Any) -> None:
        """End the connections of a gateway whose key has become invalid: it places branches here as long as its state
        stream lives. Not when a key is removed: a gateway that has the next key already keeps its stream."""
        keys = self._access.keys.value
        for connection, authorization in self._known.copy().items():
            if connection.client[:1] == client[:1] and not is_pool_key(authorization, keys):
                connection.end()

    def check(self, connection: TcpConnection, method: str, path: str, headers: list[tuple[str, str]]) -> None:
        """Whether a request may be served. The first with a key lifts the connection's bounds.

        Args:
            headers: headers with names in capitals, as gunicorn has them.

        Raises:
            TercetError: no such route, or no valid key.
        """
        if path not in OPEN_ROUTES:
            values = [value for name, value in headers if name == "AUTHORIZATION"]
            if len(values) != 1 or not is_pool_key(values[0], self._access.keys.value):
                self._end_refused(connection.client)
                raise Unauthorized(
                    "A worker's TCP port needs a key of TERCET_POOL_KEY (Authorization: Bearer …).",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            self.forget(connection)
            self._known[connection] = values[0]
        if path not in wire.ROUTES:
            raise NotFound(f"A worker's TCP port serves {', '.join(wire.ROUTES)}.")
        if method != wire.ROUTES[path]:
            raise MethodNotAllowed(f"Use {wire.ROUTES[path]} at {path}.", headers={"Allow": wire.ROUTES[path]})


def refuse(sock: socket.socket, error: TercetError, request_id: str = "") -> None:
    """Answer with the error, and read for a moment what the client still sends: else the kernel would reset the
    connection, and the client might not see the answer."""
    body = error.problem(request_id if _REQUEST_ID.fullmatch(request_id) else None)
    headers = {"Content-Type": PROBLEM_JSON, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {error.status} {error.code}", *(f"{k}: {v}" for k, v in (headers | error.headers).items())]
    with suppress(OSError):
        sock.settimeout(LINGER_S)
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        util.close_graceful(sock, LINGER_S, LINGER_BYTES)


class TcpConnection(TConn):  # type: ignore[misc]  # gunicorn has no type hints
    """A connection on the TCP port. Its handshake runs in the thread that handles its first request.

    Attributes:
        ends_at: monotonic; when it ends if it has shown no key by then.
        is_entering: it holds a thread without having shown a key.
    """

    def __init__(
        self,
        port: TcpPort,
        cfg: Any,
        sock: socket.socket,
        client: Any,
        server: Any,
        tls: WatchedFiles[ServerTls] | None,
    ) -> None:
        super().__init__(cfg, sock, client, server)
        self.sock: socket.socket
        self._port = port
        self._tls = tls
        self.ends_at = time.monotonic() + ENTRY_S
        self.is_entering = False
        self.timeout = self.ends_at  # of gunicorn's queue of connections without a request

    def init(self) -> None:
        """
        Raises:
            StopIteration: the handshake failed; gunicorn then closes the connection and logs nothing.
        """
        if self._tls is not None and not self.initialized:
            self.sock.settimeout(max(0.1, self.ends_at - time.monotonic()))
            try:
                self.sock = self._tls.value.context.wrap_socket(self.sock, server_side=True)
            except OSError as error:  # ssl.SSLError is one; a scanner, a client without TLS, or one with another CA
                log.info("handshake_failed", kind=type(error).__name__, reason=getattr(error, "reason", None))
                raise StopIteration from None
        super().init()

    @property
    def has_data(self) -> bool:
        """Whether decrypted data waits in the TLS layer, which a poll of the socket cannot see."""
        return isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0

    def end(self) -> None:
        """Make reads and writes fail. Not `SSLSocket.shutdown`, which takes the TLS layer from under a thread."""
        with suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self, graceful: bool = False) -> None:
        """At once: gunicorn's `graceful` waits for the client, in the main thread."""
        self._port.discard(self)
        util.close(self.sock)
