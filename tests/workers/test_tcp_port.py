"""The TCP port of a worker without its process: real sockets and TLS, the worker's own connection handling, an app that
stands for the slot's. Needs no model. tests/e2e/test_worker_ports.py has the port of a real worker."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from gunicorn.workers.gthread import ThreadWorker

from shared.masters.startup import PortAccess, server_tls
from shared.pool_keys import watch_pool_keys
from shared.watched_files import POLL_S, WatchedFiles
from tests.tls import Certificate
from tests.workers.test_gunicorn_worker import CHUNK, HEAD, LAST_CHUNK, slot_worker
from workers.gunicorn_worker import SlotWorker
from workers.tcp_port import ENTRY_S, ENTRY_THREADS, MAX_STRANGERS, TcpConnection, TcpPort

KEY = "k" * 64


class Peer:
    """A client on TLS, and the worker's side of its connection."""

    def __init__(self, worker: SlotWorker, port: TcpPort, certificate: Certificate, stack: ExitStack) -> None:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        plain = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        accepted, address = listener.accept()
        conn = port.connection(worker.cfg, stack.enter_context(accepted), address, listener.getsockname())
        assert conn is not None
        self.conn: TcpConnection = conn
        stack.callback(conn.close)
        self.conn.data_ready = True
        self._worker = worker
        context = certificate.client()
        self.client: ssl.SSLSocket = context.wrap_socket(
            plain, server_hostname="127.0.0.1", do_handshake_on_connect=False
        )
        stack.callback(self.client.close)
        self.results: list[object] = []

    def send(self, *parts: bytes, handle: Any = None) -> bytes:
        """The response to a request that is sent in parts, each in a TLS record of its own."""

        def serve() -> None:
            self.results.append((handle or SlotWorker.handle)(self._worker, self.conn))

        thread = threading.Thread(target=serve)
        thread.start()
        for part in parts:
            self.client.sendall(part)
            time.sleep(0.02)
        received = self.client.recv(1 << 16)
        thread.join(10)
        self.client.settimeout(0.05)
        with suppress(TimeoutError, OSError):
            while more := self.client.recv(1 << 16):
                received += more
        self.client.settimeout(10)
        return received


def request(content: bytes, key: str = KEY, path: str = "/generate", method: str = "POST") -> tuple[bytes, bytes]:
    """Head and body, as a gateway's HTTP client sends them."""
    head = f"{method} {path} HTTP/1.1\r\nHost: gpu-a.example:8100\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Length: {len(content)}\r\nX-Request-Id: r1\r\nX-Session-Id: 00ff\r\n\r\n"
    return head.encode(), content


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path)


@pytest.fixture
def port(tmp_path: Path, certificate: Certificate) -> TcpPort:
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_text(KEY)
    files = (certificate.cert, certificate.key)
    return TcpPort(
        PortAccess(watch_pool_keys(tmp_path / "key"), WatchedFiles("tls", files, lambda: server_tls(*files))),
        lambda: None,
    )


@pytest.fixture
def worker(port: TcpPort, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlotWorker]:
    with slot_worker() as made:
        made._port = port
        made._num_busy, made._count_lock = 0, threading.Lock()
        monkeypatch.setattr(made, "_wait_for_next_request", lambda _: False)
        yield made


@pytest.fixture
def peer(worker: SlotWorker, port: TcpPort, certificate: Certificate) -> Iterator[Peer]:
    with ExitStack() as stack:
        yield Peer(worker, port, certificate, stack)


def test_the_first_request_goes_gunicorns_way_and_the_next_past_it(worker: SlotWorker, peer: Peer) -> None:
    """Head and body come in records of their own: the second read must not miss what TLS has already decrypted."""
    assert peer.send(*request(b"first")).startswith(b"HTTP/1.1 200 OK\r\nServer: gunicorn")
    assert peer.send(*request(b'{"prompt":"a"}')) == HEAD + CHUNK + LAST_CHUNK
    assert peer.send(b"".join(request(b'{"prompt":"b"}'))) == HEAD + CHUNK + LAST_CHUNK
    assert worker.wsgi.contents == [b'{"prompt":"a"}', b'{"prompt":"b"}']  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", ["/generate", "/state", "/metrics"])
def test_each_request_of_a_connection_needs_a_key(worker: SlotWorker, peer: Peer, path: str) -> None:
    assert b"200 OK" in peer.send(*request(b"first"))
    refusal = peer.send(*request(b"content", "x" * 64, path))
    assert refusal.startswith(b"HTTP/1.1 401 unauthorized\r\n")
    assert KEY.encode() not in refusal
    assert worker.wsgi.contents == []  # type: ignore[attr-defined]
    assert peer.results[-1] is False  # the connection ends


def test_a_gateway_whose_key_has_become_invalid_loses_its_other_connections(
    worker: SlotWorker, port: TcpPort, certificate: Certificate, tmp_path: Path
) -> None:
    """Its state stream among them: while that lives, it places branches here, which are all refused."""
    with ExitStack() as stack:
        stream, branch = (Peer(worker, port, certificate, stack) for _ in range(2))
        for peer in (stream, branch):
            assert b"200 OK" in peer.send(*request(b"first"))
        new = "n" * 64
        (tmp_path / "key").write_text(f"{new}\n")
        time.sleep(POLL_S + 0.1)
        assert b"200 OK" in branch.send(*request(b"content", new), handle=ThreadWorker.handle)
        with pytest.raises(TimeoutError):  # no request was refused: it stays
            ended(stream)
        assert branch.send(*request(b"content")).startswith(b"HTTP/1.1 401 ")
        assert ended(stream) == b""


def ended(peer: Peer) -> bytes:
    peer.conn.sock.settimeout(0.1)
    return peer.conn.sock.recv(1)


def test_a_request_without_a_key_is_refused_before_its_body_is_read(worker: SlotWorker, peer: Peer) -> None:
    head, _ = request(b"x" * 1000, "")
    assert peer.send(head).startswith(b"HTTP/1.1 401 ")


def test_a_failed_handshake_ends_the_connection_quietly(
    worker: SlotWorker, port: TcpPort, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, address = listener.accept()
        conn = port.connection(worker.cfg, accepted, address, None)
        assert conn is not None
        conn.data_ready = True
        client.sendall(b"GET /state HTTP/1.1\r\n\r\n")
        assert worker.handle(conn) is False
        conn.close()
    logged = capfd.readouterr()
    assert "Traceback" not in logged.out + logged.err


def test_few_threads_are_for_connections_without_a_key(
    worker: SlotWorker, port: TcpPort, certificate: Certificate
) -> None:
    with ExitStack() as stack:
        peers = [Peer(worker, port, certificate, stack) for _ in range(ENTRY_THREADS + 1)]
        *entering, waiting = [peer.conn for peer in peers]
        assert all(port.try_enter(conn) for conn in entering)
        assert not port.try_enter(waiting)
        assert port.next_waiting() is None
        port.leave(entering[0])
        port.leave(entering[0])
        assert port.next_waiting() is waiting
        port.forget(entering[1])  # it has shown a key: its thread does not count any more
        assert port.try_enter(entering[1])


def test_strangers_are_ended_in_time_and_bounded_in_number(
    worker: SlotWorker, port: TcpPort, certificate: Certificate
) -> None:
    with ExitStack() as stack:
        peer = Peer(worker, port, certificate, stack)
        port.end_late()
        peer.client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            socket.socket.recv(peer.client, 1, socket.MSG_PEEK)
        peer.conn.ends_at -= ENTRY_S
        port.end_late()
        assert peer.conn.sock.recv(1) == b""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for number in range(MAX_STRANGERS + 1):
            stack.enter_context(socket.create_connection(listener.getsockname()))
            accepted, address = listener.accept()
            stack.callback(accepted.close)
            conn = port.connection(worker.cfg, accepted, address, None)
            assert (conn is None) == (number >= MAX_STRANGERS)
