"""What the gunicorn worker class adds to a connection, and what it needs of the pinned gunicorn."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from gunicorn.config import Config
from gunicorn.glogging import Logger
from gunicorn.http.errors import InvalidRequestMethod
from gunicorn.workers.gthread import TConn, ThreadWorker

from shared import wire
from shared.call_threads import CallThreads
from shared.errors import SlotFull
from workers.gunicorn_worker import SlotWorker

ROOT = Path(__file__).parents[2]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK, LAST_CHUNK = b"3\r\nab\n\r\n", b"0\r\n\r\n"


Pair = tuple[socket.socket, socket.socket]


class Lines:
    """Chunks as `workers.app.BranchLines` has them, without a branch."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks
        self.is_complete = False
        self.is_closed = False

    def __iter__(self) -> Iterator[bytes]:
        for index, chunk in enumerate(self._chunks):
            self.is_complete = index == len(self._chunks) - 1
            yield chunk

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # a packet is a send
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def send(lines: Any, ours: socket.socket, *, keeps_connection: bool = True) -> bool:
    return SlotWorker._send_lines(SlotWorker.__new__(SlotWorker), lines, ours, keeps_connection=keeps_connection)


def test_a_branch_that_has_ended_is_one_send(pair: Pair) -> None:
    ours, theirs = pair
    lines = Lines(b"ab\n")
    assert send(lines, ours)
    assert theirs.recv(1 << 16) == HEAD + CHUNK + LAST_CHUNK
    assert lines.is_closed


def test_lines_leave_as_they_come_and_the_last_with_the_end_of_the_body(pair: Pair) -> None:
    ours, theirs = pair
    send(Lines(b"ab\n", b"ab\n", b"ab\n"), ours)
    sends = [theirs.recv(1 << 16) for _ in range(3)]
    assert sends == [HEAD + CHUNK, CHUNK, CHUNK + LAST_CHUNK]


def test_a_worker_that_stops_says_that_it_closes_the_connection(pair: Pair) -> None:
    ours, theirs = pair
    assert not send(Lines(b"ab\n"), ours, keeps_connection=False)
    assert b"\r\nConnection: close\r\n" in theirs.recv(1 << 16)


def test_a_branch_ends_with_its_connection(pair: Pair) -> None:
    ours, theirs = pair
    theirs.close()
    lines = Lines(b"ab\n", b"ab\n")
    with pytest.raises(BrokenPipeError):
        send(lines, ours)
    assert lines.is_closed


class App:
    """Stands for `SlotApp`; refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.contents: list[bytes] = []
        self.is_full = False

    def generate(self, content: bytes, _client: socket.socket) -> Any:
        if self.is_full:
            raise SlotFull("full")
        self.contents.append(content)
        return Lines(b"ab\n")

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        content = environ["wsgi.input"].read()
        start_response("503 Full" if self.is_full else "200 OK", [("Content-Length", str(len(content)))])
        return [content]


@contextmanager
def slot_worker() -> Iterator[SlotWorker]:
    """A worker's object without its process."""
    config = Config()
    worker = SlotWorker(1, 2, [], None, 10, config, Logger(config))
    worker.wsgi = App()  # type: ignore[assignment]
    worker.max_keepalived = 10
    yield worker
    worker.tmp.close()


@pytest.fixture
def connected() -> Iterator[tuple[SlotWorker, TConn, socket.socket]]:
    """A worker, and a connection whose first request gunicorn has parsed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.settimeout(5)
    with ours, theirs, slot_worker() as worker:
        conn = TConn(worker.cfg, ours, "", "")
        conn.data_ready = True
        theirs.sendall(request(b"first"))
        assert ThreadWorker.handle(worker, conn) is True
        assert theirs.recv(1 << 16).endswith(b"first")
        yield worker, conn, theirs


def request(content: bytes, head: bytes = b"POST /generate HTTP/1.1\r\nHost: slot\r\n") -> bytes:
    return head + b"Content-Length: %d\r\nX-Request-Id: r-1\r\n\r\n%s" % (len(content), content)


def test_a_branch_takes_neither_gunicorns_parser_nor_wsgi(connected: Any) -> None:
    worker, conn, theirs = connected
    for content in (b'{"prompt":"a"}', b'{"prompt":"b"}'):
        theirs.sendall(request(content))
        assert worker._handle_generate(conn)
        assert theirs.recv(1 << 16) == HEAD + CHUNK + LAST_CHUNK
    assert worker.wsgi.contents == [b'{"prompt":"a"}', b'{"prompt":"b"}']


@pytest.mark.parametrize(
    "head",
    [
        b"POST /tokenize HTTP/1.1\r\nHost: slot\r\n",
        b"POST /generate HTTP/1.1\r\nHost: slot\r\nX-More: 1\r\n",
    ],
)
def test_another_request_goes_gunicorns_way(connected: Any, head: bytes) -> None:
    worker, conn, theirs = connected
    theirs.sendall(request(b"content", head))
    assert worker._handle_generate(conn)
    answer = theirs.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\nServer: gunicorn")
    assert answer.endswith(b"content")
    assert worker.wsgi.contents == []


def test_ambiguous_framing_is_left_to_gunicorn_which_ends_the_connection(connected: Any) -> None:
    worker, conn, theirs = connected
    theirs.sendall(request(b"content", b"POST /generate HTTP/1.1\r\nHost: slot\r\nContent-Length: 7\r\n"))
    assert worker._handle_generate(conn) is False
    assert worker.wsgi.contents == []


def test_a_request_that_comes_in_parts_goes_gunicorns_way(connected: Any) -> None:
    worker, conn, theirs = connected
    data = request(b"content")
    theirs.sendall(data[:-3])
    later = threading.Timer(0.05, theirs.sendall, (data[-3:],))
    later.start()
    assert worker._handle_generate(conn)
    assert theirs.recv(1 << 16).endswith(b"content")
    later.join()


def test_a_refused_branch_is_answered_by_the_app_and_the_connection_serves_on(connected: Any) -> None:
    worker, conn, theirs = connected
    worker.wsgi.is_full = True
    theirs.sendall(request(b"content"))
    assert worker._handle_generate(conn)
    assert theirs.recv(1 << 16).startswith(b"HTTP/1.1 503 Full\r\n")
    worker.wsgi.is_full = False
    theirs.sendall(request(b"content"))
    assert worker._handle_generate(conn)
    assert theirs.recv(1 << 16) == HEAD + CHUNK + LAST_CHUNK


@pytest.mark.parametrize("kind", [BaseException, SystemExit, ZeroDivisionError])
def test_an_exception_of_any_class_ends_its_connection_and_not_the_main_loop(
    connected: Any, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    worker, conn, theirs = connected
    worker.nr_conns = 1
    monkeypatch.setattr(worker, "handle", Mock(side_effect=kind))
    deferred: list[Any] = []
    worker.method_queue = SimpleNamespace(defer=lambda *call: deferred.append(call))
    worker._serve(conn)
    [(finish, *arguments)] = deferred
    theirs.shutdown(socket.SHUT_WR)  # the gateway closes, too
    finish(*arguments)
    assert worker.nr_conns == 0
    assert theirs.recv(1) == b""


def test_a_request_for_which_no_thread_can_be_started_is_refused(
    connected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, conn, theirs = connected
    worker.nr_conns, worker._num_busy, worker._threads = 1, 0, CallThreads("http", 3)
    theirs.sendall(request(b"content"))
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    monkeypatch.setattr("workers.tcp_port.LINGER_S", 0.05)
    worker.enqueue_req(conn)
    assert wire.read_refusal(503, theirs.recv(1 << 16).partition(b"\r\n\r\n")[2])[0] == "slot_full"
    assert worker.nr_conns == 0


def test_a_connection_that_cannot_be_accepted_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.gunicorn_worker.ACCEPT_PAUSE_S", 0.0)
    listener = SimpleNamespace(sock=SimpleNamespace(family=socket.AF_UNIX))
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO):
        listener.accept = Mock(side_effect=OSError(number, "injected"))
        with slot_worker() as worker:
            worker.slot_index = 0
            worker.accept(listener)
            assert worker.nr_conns == 0


def test_a_connection_that_the_gateway_has_closed_ends(connected: Any) -> None:
    worker, conn, theirs = connected
    theirs.shutdown(socket.SHUT_WR)
    assert worker._handle_generate(conn) is False


# The contract with gunicorn ----------------------------------------------------------------------

OVERRIDDEN = {
    *("init_process", "init_signals", "load_wsgi", "run", "notify", "wait_for_and_dispatch_events", "enqueue_req"),
    *("accept", "handle", "handle_request", "handle_error", "set_accept_enabled"),
}


def test_gunicorn_is_the_version_that_was_read() -> None:
    """If this fails with another version, read gthread.py again, then change this line."""
    assert version("gunicorn") == "27.0.1"
    assert "gunicorn==27.0.1" in (ROOT / "requirements/serve.txt").read_text()


def test_no_method_overrides_one_of_gunicorn_by_accident() -> None:
    theirs = {name for kind in ThreadWorker.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}
    ours = {name for name in vars(SlotWorker) if not name.startswith("__")}
    assert ours & theirs == OVERRIDDEN


def test_what_a_client_sent_in_error_reaches_no_log_and_no_answer(
    pair: Pair, capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pair
    worker = SlotWorker.__new__(SlotWorker)
    worker.handle_error(None, ours, ("", 0), InvalidRequestMethod("canary"))
    with pytest.raises(BlockingIOError):
        theirs.recv(1 << 16)
    logged = capfd.readouterr()
    assert "InvalidRequestMethod" in logged.out + logged.err
    assert "canary" not in logged.out + logged.err
