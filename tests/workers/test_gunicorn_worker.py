"""What the gunicorn worker class adds to a connection, and what it needs of the pinned gunicorn."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from gunicorn.config import Config
from gunicorn.http import get_parser
from gunicorn.http.errors import InvalidRequestMethod
from gunicorn.workers.gthread import PollableMethodQueue, TConn, ThreadWorker

from workers.gunicorn_worker import HoldingSocket, SlotWorker

ROOT = Path(__file__).parents[2]
HEAD, CHUNK, LAST_CHUNK = b"HTTP/1.1 200 OK\r\n\r\n", b"3\r\nab\n\r\n", b"0\r\n\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[HoldingSocket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.setblocking(False)
    with ours, theirs:
        yield HoldingSocket(ours), theirs


def received(theirs: socket.socket) -> bytes:
    try:
        return theirs.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_the_head_is_sent_with_the_first_chunk(pair: tuple[HoldingSocket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(HEAD)
    assert received(theirs) == b""
    ours.sendall(CHUNK)
    assert received(theirs) == HEAD + CHUNK
    ours.sendall(CHUNK)
    assert received(theirs) == CHUNK


def test_after_hold_the_last_chunk_is_sent_with_the_terminating_chunk(
    pair: tuple[HoldingSocket, socket.socket],
) -> None:
    ours, theirs = pair
    ours.hold()
    ours.sendall(CHUNK)
    assert received(theirs) == b""
    ours.sendall(LAST_CHUNK)
    assert received(theirs) == CHUNK + LAST_CHUNK


def test_a_head_without_a_body_is_sent_at_the_end(pair: tuple[HoldingSocket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(HEAD)
    ours.flush()
    ours.flush()
    assert received(theirs) == HEAD
    assert ours.fileno() == ours.socket.fileno()


# The contract with gunicorn ----------------------------------------------------------------------

OVERRIDDEN = {
    "init_process": (),
    "load_wsgi": (),
    "notify": (),
    "enqueue_req": ("conn",),
    "handle": ("conn",),
    "handle_exit": ("sig", "frame"),
    "handle_error": ("req", "client", "addr", "exc"),
    "handle_request": ("req", "conn"),
    "set_accept_enabled": ("enabled",),
}


def parameters(function: object) -> tuple[str, ...]:
    assert callable(function)
    return tuple(inspect.signature(function).parameters)[1:]


def source_of(function: object) -> str:
    assert inspect.isfunction(function)
    return inspect.getsource(function)


def test_gunicorn_is_the_version_that_was_read() -> None:
    """With another version: read gthread.py again, then change this line."""
    assert version("gunicorn") == "27.0.1"
    assert "gunicorn==27.0.1" in (ROOT / "requirements/serve.txt").read_text()


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_every_overridden_method_exists_with_its_parameters(name: str) -> None:
    assert parameters(getattr(ThreadWorker, name)) == OVERRIDDEN[name]
    assert parameters(getattr(SlotWorker, name)) == OVERRIDDEN[name]


def test_no_method_overrides_one_of_gunicorn_by_accident() -> None:
    theirs = {name for kind in ThreadWorker.__mro__[:-1] for name in vars(kind) if not name.startswith("__")}
    ours = {name for name in vars(SlotWorker) if not name.startswith("__")}
    assert ours & theirs == set(OVERRIDDEN)


@pytest.fixture
def worker() -> Iterator[ThreadWorker]:
    config = Config()
    made = ThreadWorker(1, 2, [], None, 10, config, None)
    yield made
    made.tmp.close()


def test_a_worker_has_the_attributes_that_the_class_uses(worker: ThreadWorker) -> None:
    assert (worker.age, worker.alive) == (1, True)
    assert {"threads", "graceful_timeout"} <= worker.cfg.settings.keys()
    assert isinstance(worker.method_queue, PollableMethodQueue)


def test_a_deferred_call_wakes_the_main_loop(worker: ThreadWorker) -> None:
    called: list[str] = []
    worker.method_queue.init()
    worker.method_queue.defer(called.append, "now")
    worker.method_queue.run_callbacks(None)
    worker.method_queue.close()
    assert called == ["now"]


def test_a_connection_shows_what_its_parser_has_read_ahead() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        theirs.sendall(request + request[:10])
        conn = TConn(Config(), ours, None, None)
        conn.init()
        assert next(conn.parser).path == "/"
        assert conn.parser.unreader.buf.getvalue() == request[:10]
        assert isinstance(conn.parser, type(get_parser(Config(), ours, None)))
        assert conn.sock is ours


def test_a_response_is_sent_by_sendall_head_first() -> None:
    """`HoldingSocket` knows the head by its first bytes, and the end by the terminating chunk."""
    sent: list[bytes] = []

    class Socket:
        def sendall(self, data: bytes) -> None:
            sent.append(data)

    from gunicorn.http.message import Request
    from gunicorn.http.unreader import IterUnreader
    from gunicorn.http.wsgi import Response

    config = Config()
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    response = Response(Request(config, IterUnreader([head]), ("127.0.0.1", 1)), Socket(), config)
    response.start_response("200 OK", [("Content-Type", "text/plain")])
    response.write(b"ab\n")
    response.close()
    assert sent[0].startswith(b"HTTP/1.1 200 OK\r\n")
    assert sent[0].endswith(b"\r\n\r\n")
    assert sent[1:] == [CHUNK, LAST_CHUNK]


def test_the_main_loop_and_the_threads_call_what_is_overridden() -> None:
    """The heartbeat comes each turn, `handle` returns True where a connection is kept, and `handle_request` reads
    `conn.sock`, which is what `SlotWorker` exchanges."""
    run = source_of(ThreadWorker.run)
    assert run.count("self.notify()") == 2
    assert "self.set_accept_enabled(can_accept)" in run
    assert "self.wsgi = self.app.wsgi()" in source_of(ThreadWorker.load_wsgi)
    assert "submit(self.handle, conn)" in source_of(ThreadWorker.enqueue_req)
    handle = source_of(ThreadWorker.handle)
    assert "return self._keepalive_after(conn, self.handle_request(req, conn))" in handle
    assert "wsgi.create(req, conn.sock" in source_of(ThreadWorker.handle_request)
    assert "conn.parser.unreader.buf.getvalue()" in source_of(ThreadWorker.finish_request)


def test_what_a_client_sent_in_error_reaches_no_log_and_no_answer(
    pair: tuple[HoldingSocket, socket.socket], capfd: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = pair
    ours.sendall(b"")
    worker = SlotWorker.__new__(SlotWorker)
    worker.handle_error(None, ours, ("", 0), InvalidRequestMethod("canary"))
    assert received(theirs) == b""
    logged = capfd.readouterr()
    assert "InvalidRequestMethod" in logged.out + logged.err
    assert "canary" not in logged.out + logged.err
