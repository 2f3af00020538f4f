"""Moments of the gateway's HTTP server that a process seldom shows. tests/e2e/test_clients.py tests its behaviour."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import structlog

from gateway.server.connections import Phase
from gateway.server.http_server import IDLE_LINGER_S, GatewayServer
from gateway.server.listeners import Listeners
from shared.sockets import Poller
from tests.gateway.server.test_connections import GET, Peers, post

ACCEPTED_AT = 100.0


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.client.close()
    peers.connection.close()


@pytest.fixture
def waiting() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A listening socket, and a connection that waits in its backlog."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.connect(listener.getsockname())
        listener.setblocking(False)
        yield listener, client


def stopping(peers: Peers, *, is_replaced: bool) -> GatewayServer:
    """A server without its process, whose listener is closed, with one connection."""
    server = GatewayServer.__new__(GatewayServer)
    server.settings = SimpleNamespace(  # type: ignore[assignment]
        server=SimpleNamespace(drain_s=0.0, grace_s=30.0),
        limits=SimpleNamespace(max_body_bytes=100),
        access=SimpleNamespace(origins=()),
    )
    server._connections = {peers.connection.fileno(): peers.connection}
    server._poller = Poller()
    server._poller.register(peers.connection.fileno(), select.POLLIN)
    server._num_buffered = 0
    server._stop_began_at = server._listening_ended_at = ACCEPTED_AT
    server._is_replaced = is_replaced
    server._is_cancelled = False
    return server


def listeners_of(server: GatewayServer, listener: Any) -> Listeners:
    return Listeners([listener], server._poller, server._take, server._make_room)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_request_that_arrives_as_an_idle_connection_is_to_be_closed_is_read(peers: Peers, is_replaced: bool) -> None:
    """On a busy machine the main thread may sleep between its poll and its look at the time."""
    server = stopping(peers, is_replaced=is_replaced)
    peers.client.sendall(GET)
    assert not server._is_finished(ACCEPTED_AT + IDLE_LINGER_S)
    assert peers.connection.phase is Phase.IDLE  # the next poll reads it


def test_an_idle_connection_is_closed_after_its_linger(peers: Peers) -> None:
    server = stopping(peers, is_replaced=True)
    assert not server._is_finished(ACCEPTED_AT + IDLE_LINGER_S - 0.1)
    assert server._is_finished(ACCEPTED_AT + IDLE_LINGER_S)


def test_a_request_that_arrives_slowly_is_read_to_its_end_after_a_reload(peers: Peers) -> None:
    server = stopping(peers, is_replaced=True)
    peers.send(post(b"abc")[:-1])
    assert not server._is_finished(ACCEPTED_AT + 10.0)
    assert peers.connection.phase is Phase.READING


def test_a_request_that_arrives_slowly_is_refused_at_a_stop(peers: Peers) -> None:
    server = stopping(peers, is_replaced=False)
    peers.send(post(b"abc")[:-1])
    server._is_finished(ACCEPTED_AT + IDLE_LINGER_S)
    assert peers.client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")


Waiting = tuple[socket.socket, socket.socket]


def test_a_stop_that_is_noticed_late_ends_no_connection_that_it_has_just_taken(peers: Peers, waiting: Waiting) -> None:
    """A successor that got TERM during its import took connections from the backlog, and closed them without an
    answer, because its linger had passed by then."""
    listener, client = waiting
    server = stopping(peers, is_replaced=False)
    server._listening_ended_at = None
    server._max_connections = 10
    server.tls = None
    server._calls = SimpleNamespace(defer=lambda *_: None)
    server._listeners = listeners_of(server, listener)
    server._listeners.open()
    assert not server._is_finished(ACCEPTED_AT + 10.0)
    [taken] = [c for c in server._connections.values() if c is not peers.connection]
    assert taken.client == client.getsockname()
    assert taken.phase is Phase.IDLE
    assert server._is_finished(ACCEPTED_AT + 10.0 + IDLE_LINGER_S)
    taken.close()


def test_a_successor_that_stops_before_it_serves_leaves_the_backlog_to_its_predecessor(
    peers: Peers, waiting: Waiting
) -> None:
    listener, _ = waiting
    server = stopping(peers, is_replaced=False)
    server._listening_ended_at = None
    server._listeners = listeners_of(server, listener.dup())
    server._is_finished(ACCEPTED_AT + 10.0)
    sock, _ = listener.accept()
    sock.close()


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.EPROTO, errno.EPERM])
def test_a_connection_that_cannot_be_accepted_ends_nothing(number: int) -> None:
    listener = Mock(accept=Mock(side_effect=OSError(number, "injected")), fileno=lambda: 0)
    with closing(Listeners([listener], Poller(), Mock(), Mock())) as listeners:
        assert listeners.accept(0) is False


def test_a_request_that_the_main_thread_fails_on_ends_with_its_connection(peers: Peers) -> None:
    server = stopping(peers, is_replaced=False)
    server._stop_began_at = None
    server.alive = False
    server.wsgi = Mock(admit=Mock(side_effect=ZeroDivisionError))
    peers.client.sendall(GET)
    with structlog.testing.capture_logs() as logs:
        server._advance(peers.connection, ACCEPTED_AT)
    assert [event["event"] for event in logs] == ["unhandled_exception"]
    assert peers.connection.phase is Phase.CLOSED
    assert not server._connections


def test_without_a_descriptor_a_client_is_refused_with_the_spare_one_and_another_evicted(
    peers: Peers, waiting: Waiting
) -> None:
    listener, client = waiting
    server = stopping(peers, is_replaced=False)
    server._num_evicted = 0
    server.wsgi = Mock()
    accept = Mock(side_effect=[OSError(errno.EMFILE, "injected"), listener.accept()])
    with closing(listeners_of(server, Mock(accept=accept, fileno=lambda: 0))) as listeners:
        listeners.accept(0)
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    assert peers.connection.phase is Phase.CLOSED


def test_the_spare_descriptor_is_closed_once(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it could not be opened again, another file may have its number."""
    listener, _ = waiting
    listeners = Listeners([listener], Poller(), Mock(), lambda sock: None if sock is None else sock.close())
    number = listeners._spare_file.fileno()
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", Mock(side_effect=OSError(errno.EMFILE, "injected")))
        listeners._refuse_with_spare_descriptor(listener)
    other = os.open(os.devnull, os.O_RDONLY)
    os.dup2(other, number)
    listeners._refuse_with_spare_descriptor(listener)
    os.fstat(number)
    for descriptor in {other, number}:
        os.close(descriptor)
    listeners._spare_file.close()
