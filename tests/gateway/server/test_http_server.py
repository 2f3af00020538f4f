"""Threads, and moments that a process seldom shows. tests/e2e/test_clients.py tests the server's behaviour."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import structlog
from gunicorn.workers.base import Worker

from gateway.server.bounds import MAX_SMALL
from gateway.server.connections import Connection, Phase
from gateway.server.gunicorn_worker import GatewayServer
from gateway.server.http_server import IDLE_LINGER_S, HttpServer
from gateway.server.listeners import Listeners
from gateway.server.served_app import Arrival, Work
from shared.errors import QuotaExceeded, TercetError
from shared.settings import Settings
from shared.sockets import Poller
from tests.e2e.harness import until
from tests.gateway.server.test_connections import GET, post

ACCEPTED_AT = 100.0
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
OK = "200 OK"


class App:
    """Answers when it may. `admit` and `charge` permit everything."""

    def __init__(self) -> None:
        self.may_answer = threading.Semaphore(0)
        self.charge = Mock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        assert self.may_answer.acquire(timeout=20)
        start_response(OK, [("Content-Length", "1")])
        return [b"x"]

    def refuse(self, _head: object, refusal: TercetError, start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response(f"{refusal.status} {refusal.title}", [("Content-Length", "0")])
        return ()

    def admit(self, *_: object) -> Arrival:
        return Arrival(Work.TOKENIZING, "")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def server(listener: socket.socket) -> Iterator[HttpServer]:
    server = HttpServer(App(), Settings.load({}), None, [listener.dup()], 10, 2)  # type: ignore[arg-type]
    yield server
    server.end_listening()
    until(lambda: not server.num_answering, 20, "every answer's end")
    with server._lock:
        for connection in list(server._connections.values()):
            server._close(connection)


@pytest.fixture
def client(listener: socket.socket) -> Iterator[socket.socket]:
    """A client that waits in the backlog."""
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        yield client


@pytest.fixture
def connection(server: HttpServer, listener: socket.socket, client: socket.socket) -> Iterator[Connection]:
    """A connection that the server has taken."""
    sock, address = listener.accept()
    server._take(sock, address, listener.getsockname())
    [connection] = server._connections.values()
    connection.since = ACCEPTED_AT
    yield connection
    until(lambda: connection.phase is not Phase.ANSWERING, 20, "the answer's end")
    with server._lock:
        connection.close()


def end_unaccepted(server: HttpServer, waited_s: float, *, is_replaced: bool = False) -> None:
    server.end_unaccepted(ACCEPTED_AT + waited_s, waited_s, is_last_moment=False, is_replaced=is_replaced)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_request_that_arrives_as_an_idle_connection_is_to_be_closed_is_read(
    server: HttpServer, connection: Connection, client: socket.socket, is_replaced: bool
) -> None:
    """On a busy machine the main thread may sleep before its look at the time."""
    client.sendall(GET)
    end_unaccepted(server, IDLE_LINGER_S, is_replaced=is_replaced)
    assert connection.phase is Phase.IDLE  # the next poll reads it


def test_an_idle_connection_is_closed_after_its_linger(server: HttpServer, connection: Connection) -> None:
    end_unaccepted(server, IDLE_LINGER_S - 0.1, is_replaced=True)
    assert server.has_connections
    end_unaccepted(server, IDLE_LINGER_S, is_replaced=True)
    assert not server.has_connections


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_request_that_arrives_slowly_is_read_to_its_end_after_a_reload_and_refused_at_a_stop(
    server: HttpServer, connection: Connection, client: socket.socket, is_replaced: bool
) -> None:
    client.sendall(post(b"abc")[:-1])
    server._advance(connection, ACCEPTED_AT)
    end_unaccepted(server, 10.0, is_replaced=is_replaced)
    if is_replaced:
        assert connection.phase is Phase.READING
    else:
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")


def stopping(server: HttpServer) -> GatewayServer:
    """A worker without its process, whose stop has begun."""
    worker = GatewayServer.__new__(GatewayServer)
    worker.settings = SimpleNamespace(server=SimpleNamespace(drain_s=0.0, grace_s=30.0))  # type: ignore[assignment]
    worker._server = server
    worker._stop_began_at, worker._listening_ended_at = ACCEPTED_AT, None
    worker._is_replaced = worker._is_cancelled = False
    return worker


def test_a_stop_that_is_noticed_late_ends_no_connection_that_it_has_just_taken(
    server: HttpServer, client: socket.socket
) -> None:
    """A successor that got TERM during its import took connections from the backlog, and closed them without an
    answer, because its linger had passed by then."""
    server.listen()
    worker = stopping(server)
    assert not worker._is_finished(ACCEPTED_AT + 10.0)
    [taken] = server._connections.values()
    assert taken.client == client.getsockname()
    assert taken.phase is Phase.IDLE
    assert worker._is_finished(ACCEPTED_AT + 10.0 + IDLE_LINGER_S)


def test_what_was_polled_before_the_listeners_closed_ends_nothing(server: HttpServer, listener: socket.socket) -> None:
    server.listen()
    polled = [*server._listeners.by_descriptor]
    server.end_listening()
    assert not [descriptor for descriptor in polled if descriptor in server._listeners.by_descriptor]


def test_a_successor_that_stops_before_it_serves_leaves_the_backlog_to_its_predecessor(
    server: HttpServer, listener: socket.socket, client: socket.socket
) -> None:
    stopping(server)._is_finished(ACCEPTED_AT + 10.0)
    sock, _ = listener.accept()
    sock.close()


@pytest.mark.parametrize("number", [errno.ENOBUFS, errno.ENOMEM, errno.EPROTO, errno.EPERM])
def test_a_connection_that_cannot_be_accepted_ends_nothing(number: int) -> None:
    listener = Mock(accept=Mock(side_effect=OSError(number, "injected")), fileno=lambda: 0)
    with closing(Listeners([listener], Poller(), Mock(), Mock())) as listeners:
        assert listeners.accept(0) is False


def test_a_request_that_the_server_fails_on_ends_with_its_connection(
    server: HttpServer, connection: Connection, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._app, "admit", Mock(side_effect=ZeroDivisionError))
    client.sendall(GET)
    with structlog.testing.capture_logs() as logs:
        server._advance(connection, ACCEPTED_AT)
    assert [event["event"] for event in logs] == ["unhandled_exception"]
    assert connection.phase is Phase.CLOSED
    assert not server.has_connections


@pytest.mark.parametrize("sent", [post(b"abc") + GET, CHUNKED + b"3\r\n"])
def test_what_is_refused_by_its_head_gets_no_thread_and_no_body_and_what_is_behind_it_does_not_wait(
    server: HttpServer, connection: Connection, client: socket.socket, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    num, refusal = sent.count(b"HTTP/1.1"), QuotaExceeded("Too many.", retry_after_s=1)
    monkeypatch.setattr(server._app, "admit", lambda *_: Arrival(Work.REFUSED, "", refusal=refusal))
    monkeypatch.setattr("gateway.server.http_server.POLL_S", 60.0)
    monkeypatch.setattr(server, "_answer", answer := Mock(wraps=server._answer))
    client.sendall(sent)
    server._advance(connection, ACCEPTED_AT)
    assert server._take_request(ACCEPTED_AT) is None
    server.start()
    answers = b""
    while answers.count(b"HTTP/1.1 429 ") < num:
        answers += client.recv(1 << 16)
    assert [(call.args[1].body, call.args[2].refusal) for call in answer.call_args_list] == [(b"", refusal)] * num


def test_without_a_descriptor_a_client_is_refused_with_the_spare_one_and_another_evicted(
    server: HttpServer, connection: Connection, listener: socket.socket
) -> None:
    with socket.create_connection(listener.getsockname(), timeout=5) as client:
        accept = Mock(side_effect=[OSError(errno.EMFILE, "injected"), listener.accept()])
        full = Mock(accept=accept, fileno=lambda: 0)
        with closing(Listeners([full], server._poller, server._take, server._make_room)) as listeners:
            listeners.accept(0)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    assert connection.phase is Phase.CLOSED


def test_the_spare_descriptor_is_closed_once(
    listener: socket.socket, client: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it could not be opened again, another file may have its number."""
    listener.setblocking(False)
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


def connect(listener: socket.socket) -> HTTPConnection:
    host, port = listener.getsockname()
    return HTTPConnection(host, port, timeout=20)


@pytest.fixture
def clients(server: HttpServer, listener: socket.socket) -> Iterator[list[HTTPConnection]]:
    """Clients of a server that runs, whose requests are sent."""
    server.listen()
    server.start()
    clients = [connect(listener) for _ in range(MAX_SMALL + 1)]
    for client in clients:
        client.request("GET", "/")
    yield clients
    for client in clients:
        client.close()


def answers(clients: Iterable[HTTPConnection]) -> list[tuple[int, bytes]]:
    return [(response.status, response.read()) for response in (client.getresponse() for client in clients)]


def test_one_thread_leads_while_others_answer(server: HttpServer, clients: list[HTTPConnection]) -> None:
    """As many requests are answered at a time as their class has threads; one more waits for the first that is free."""
    num_threads = MAX_SMALL + 1
    until(lambda: (server.num_answering, server._num_threads) == (MAX_SMALL, num_threads), 20, "a thread for each")
    server._app.may_answer.release(len(clients))  # type: ignore[attr-defined]
    assert answers(clients) == [(200, b"x")] * len(clients)
    until(lambda: server._num_following + 1 == num_threads, 20, "all following but the leader")
    clients[0].request("GET", "/")
    server._app.may_answer.release()  # type: ignore[attr-defined]
    assert answers(clients[:1]) == [(200, b"x")]
    assert server._num_threads == num_threads


def test_a_request_without_a_thread_is_refused_and_the_next_one_served(
    server: HttpServer, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.listen()
    server.start()
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("injected")))
    with closing(connect(listener)) as client:
        client.request("GET", "/")
        assert client.getresponse().status == 503
    monkeypatch.setattr(threading.Thread, "start", start)
    with closing(connect(listener)) as client:
        server._app.may_answer.release()  # type: ignore[attr-defined]
        client.request("GET", "/")
        assert answers([client]) == [(200, b"x")]


def test_no_method_overrides_one_of_gunicorn_by_accident() -> None:
    theirs = {name for name in vars(Worker) if not name.startswith("__")}
    ours = {name for name in vars(GatewayServer) if not name.startswith("__")}
    assert ours & theirs == {"init_process", "init_signals", "load_wsgi", "run"}
