"""Large requests are read at a bounded rate, in the order in which more of them arrives."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gateway.server.connections import LARGE_BYTES, READ_BYTES, Connection, Phase
from gateway.server.large_reads import READ_S, LargeReads
from tests.gateway.server.arrivals import advance


class Clients:
    """Connections that have received what their client has sent."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def after(self, request: bytes) -> Connection:
        client, server = socket.socketpair()
        connection = Connection(server, "", "", now=0.0, max_body_bytes=1 << 20, tls=None)
        self._stack.callback(connection.close)
        self._stack.callback(client.close)
        client.sendall(request)
        advance(connection, 0.0)
        return connection

    def large(self) -> Connection:
        return self.after(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % LARGE_BYTES)


@pytest.fixture
def clients() -> Iterator[Clients]:
    with ExitStack() as stack:
        yield Clients(stack)


@pytest.mark.parametrize(
    ("request_bytes", "is_large"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n{", False),
        (b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n", False),  # its head is not complete
        (b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n{", True),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n", True),
    ],
)
def test_a_request_is_large_by_what_its_head_says(clients: Clients, request_bytes: bytes, is_large: bool) -> None:
    assert clients.after(request_bytes).is_receiving_large is is_large


def test_large_requests_are_read_in_turn_a_megabyte_at_once_and_then_at_a_bounded_rate(clients: Clients) -> None:
    reads = LargeReads()
    assert (reads.take(10.0), reads.resumes_at) == ([], math.inf)
    num_at_once = (1 << 20) // READ_BYTES
    arrived = [clients.large() for _ in range(3)] * (num_at_once // 3 + 2)
    for connection in arrived:
        reads.append(connection)
    taken = reads.take(10.0)
    assert num_at_once <= len(taken) <= num_at_once + 1
    assert taken == arrived[: len(taken)]
    assert reads.take(10.0) == []
    assert 10.0 < reads.resumes_at <= 10.0 + READ_S
    assert reads.take(reads.resumes_at) == arrived[len(taken) : len(taken) + 1]
    assert len(reads.take(reads.resumes_at + 0.99 * READ_S)) == 1
    while reads.take(reads.resumes_at):
        pass
    assert reads.resumes_at == math.inf


def test_a_connection_that_has_closed_is_not_read(clients: Clients) -> None:
    reads = LargeReads()
    closed, open_one = clients.large(), clients.large()
    for connection in (closed, open_one):
        reads.append(connection)
    closed.close()
    assert closed.phase is Phase.CLOSED
    assert reads.take(0.0) == [open_one]
