"""What the gateway's HTTP server needs of the pinned gunicorn, and moments of its stop that a process seldom shows.
tests/e2e/test_clients.py tests its behaviour."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import structlog
from gunicorn.workers.gthread import ThreadWorker

from gateway.server.connections import Phase
from gateway.server.http_server import IDLE_LINGER_S, GatewayServer
from shared.sockets import Poller
from tests.gateway.server.test_connections import GET, Peers, post

OVERRIDDEN = {"init_process", "init_signals", "load_wsgi", "run"}


def test_gunicorn_is_the_version_that_was_read() -> None:
    """If this fails, read gthread.py, http/parser.py and http/wsgi.py again, then change this line."""
    assert version("gunicorn") == "27.0.1"


def test_no_method_overrides_one_of_gunicorn_by_accident() -> None:
    theirs = {name for kind in ThreadWorker.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}
    ours = {name for name in vars(GatewayServer) if not name.startswith("__")}
    assert ours & theirs == OVERRIDDEN


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
        server=SimpleNamespace(drain_s=0.0, grace_s=30.0), limits=SimpleNamespace(max_body_bytes=100)
    )
    server._connections = {peers.connection.fileno(): peers.connection}
    server._poller = Poller()
    server._poller.register(peers.connection.fileno(), select.POLLIN)
    server._num_buffered = 0
    server._stop_began_at = server._listening_ended_at = ACCEPTED_AT
    server._is_replaced = is_replaced
    server._is_cancelled = False
    server._is_accepting = True
    server._cors_headers = lambda request: []  # type: ignore[method-assign]
    return server


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
    server.method_queue = SimpleNamespace(defer=lambda *_: None)
    server.sockets = [listener]
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
    server._is_accepting = False
    server.sockets = [listener.dup()]
    server._is_finished(ACCEPTED_AT + 10.0)
    sock, _ = listener.accept()
    sock.close()


def test_a_connection_that_cannot_be_accepted_ends_nothing(peers: Peers) -> None:
    server = stopping(peers, is_replaced=False)
    for number in (errno.ENOBUFS, errno.ENOMEM, errno.EPROTO, errno.EPERM):
        listener = SimpleNamespace(accept=Mock(side_effect=OSError(number, "injected")))
        assert server._accept(listener, ACCEPTED_AT) is False


def test_a_request_that_the_main_thread_fails_on_ends_with_its_connection(peers: Peers) -> None:
    server = stopping(peers, is_replaced=False)
    server._stop_began_at = None
    server.alive = False
    server.wsgi = Mock(classify=Mock(side_effect=ZeroDivisionError))
    peers.client.sendall(GET)
    with structlog.testing.capture_logs() as logs:
        server._advance(peers.connection, ACCEPTED_AT)
    assert [event["event"] for event in logs] == ["unhandled_exception"]
    assert peers.connection.phase is Phase.CLOSED
    assert not server._connections


def test_the_spare_descriptor_is_closed_once(peers: Peers, waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it could not be opened again, another file may have its number."""
    listener, _ = waiting
    server = stopping(peers, is_replaced=False)
    server._num_evicted = 0
    server.wsgi = Mock()
    server._spare_file = open(os.devnull, "rb")  # noqa: SIM115
    number = server._spare_file.fileno()
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", Mock(side_effect=OSError(errno.EMFILE, "injected")))
        server._refuse_with_spare_descriptor(listener)
    other = os.open(os.devnull, os.O_RDONLY)
    os.dup2(other, number)
    server._refuse_with_spare_descriptor(listener)
    os.fstat(number)
    os.close(other)
    os.close(number)
    server._spare_file.close()
