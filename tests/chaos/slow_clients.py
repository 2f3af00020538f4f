"""Clients that hold connections of a server without finishing what they began, as an attacker would, in one thread."""

from __future__ import annotations

import random
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from tests.chaos.http_client import LOOPBACK, completion_request, request_bytes

# head, body: a request that is sent byte by byte. unread: pipelined requests whose responses are never read. reading: a
# response that is read byte by byte. handshake: a TLS handshake that is sent byte by byte. idle: nothing is sent.
Kind = Literal["head", "body", "unread", "reading", "handshake", "idle"]
PERIOD_S = 1.0
# The longest of the page's files: a few responses fill the buffers of a connection.
LONG_RESPONSE = "/static/page.js"
NUM_PIPELINED = 40
_HAS_ENDED = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class _SlowClient:
    def __init__(self, port: int, tls: ssl.SSLContext | None, kind: Kind, source: str, rng: random.Random) -> None:
        self.kind = kind
        self._port, self._tls, self._source = port, tls, source
        self._first, self._dripped = _script(kind, rng)
        self._position = 0
        self.socket: socket.socket | None = None

    def connect(self) -> None:
        """
        Raises:
            OSError: refused, or the handshake failed.
        """
        self.close()
        self._position = 0
        connection = socket.socket()
        try:
            if self.kind in {"unread", "reading"}:  # little that is read ahead; the kernel doubles it (`man 7 socket`)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.settimeout(2.0)
            connection.bind((self._source, 0))
            connection.connect((LOOPBACK, self._port))
            if self._tls is not None and self.kind not in {"handshake", "idle"}:
                connection = self._tls.wrap_socket(connection, server_hostname=LOOPBACK)
            connection.settimeout(0.0)
            if self._first:
                connection.send(self._first)
        except OSError:
            connection.close()
            raise
        self.socket = connection

    def has_ended(self) -> bool:
        """Whether the server has closed the connection, or answered what no complete request asked for."""
        assert self.socket is not None
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return any(event & _HAS_ENDED for _, event in poll.poll(0))

    def drip(self) -> None:
        """Send, or read, the next byte."""
        assert self.socket is not None
        with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if self.kind == "reading":
                self.socket.recv(1)
            elif self._dripped:
                index = self._position % len(self._dripped)
                self._position += 1
                self.socket.send(self._dripped[index : index + 1])

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None


def _script(kind: Kind, rng: random.Random) -> tuple[bytes, bytes]:
    """What a client sends at once, and what it sends byte by byte, again from its start after its end."""
    head, _, _ = completion_request().partition(b"\r\n\r\n")
    match kind:
        case "head":
            return head[: rng.randrange(len(head))], b"X-Slow: 1\r\n"
        case "body":
            return request_bytes("POST", "/autocomplete", b" " * 4096)[:-4096], b" "
        case "unread":
            return request_bytes("GET", LONG_RESPONSE) * NUM_PIPELINED, b""
        case "reading":
            return request_bytes("GET", LONG_RESPONSE), b""
        case "handshake":
            return b"", _client_hello()[:-1]
        case "idle":
            return b"", b""


def _client_hello() -> bytes:
    """The first message of a TLS handshake."""
    outgoing = ssl.MemoryBIO()
    handshake = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        handshake.do_handshake()
    return outgoing.read()


class SlowClients:
    """Keeps a number of slow clients connected: a client that the server has closed connects again.

    Attributes:
        counts: connections opened, closed by the server, and refused.
    """

    def __init__(self, port: int, tls: ssl.SSLContext | None, kinds: Sequence[Kind], seed: int) -> None:
        """Clients of a port of the loopback interface. Limits are per address, so 200 clients share none."""
        self.counts = Counter[str]()
        self._clients = [
            _SlowClient(port, tls, kind, f"127.0.{1 + n // 200}.{1 + n % 200}", random.Random(f"{seed}/{n}"))
            for n, kind in enumerate(kinds)
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow-clients")

    @contextmanager
    def running(self) -> Iterator[SlowClients]:
        """All are connected when the block begins; they stay until it ends."""
        for client in self._clients:
            self._connect(client)
            time.sleep(PERIOD_S / len(self._clients))
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()
            for client in self._clients:
                client.close()

    @property
    def num_connected(self) -> int:
        return sum(client.socket is not None for client in self._clients)

    def _run(self) -> None:
        """Each client has its turn once per period, evenly spread: all at once would be a flood."""
        while True:
            for client in self._clients:
                if self._stop.wait(PERIOD_S / len(self._clients)):
                    return
                self._advance(client)

    def _advance(self, client: _SlowClient) -> None:
        if client.socket is None:
            self._connect(client)
            return
        try:
            if client.has_ended():
                raise ConnectionResetError
            client.drip()
        except OSError:
            self.counts["closed by the server"] += 1
            self._connect(client)

    def _connect(self, client: _SlowClient) -> None:
        try:
            client.connect()
            self.counts["opened"] += 1
        except OSError:
            client.close()
            self.counts["refused"] += 1
