"""Clients that are slow, wrong or many, on sockets of their own, against a real gateway without nginx."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import LISTED_ORIGIN
from tests.e2e.harness import Tercet, exchange_bytes, metric, running, until
from tests.e2e.shared_servers import SharedServer

pytestmark = pytest.mark.quick
CLIENT_TIMEOUT_S = 4.0  # longer than three requests take on a slow machine
MAX_CONNECTIONS = 120
CANARY = b"xyzzy-canary"
FIELDS = b"Host: localhost\r\nOrigin: %s\r\n" % LISTED_ORIGIN.encode()
LIVE = b"GET /health/live HTTP/1.1\r\n" + FIELDS
POST = b"POST /autocomplete HTTP/1.1\r\n" + FIELDS
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def tercet(server_with: Callable[..., SharedServer]) -> SharedServer:
    """A gateway with small limits, logging at debug."""
    limits = {"client_timeout_s": str(CLIENT_TIMEOUT_S), "test_max_connections": str(MAX_CONNECTIONS)}
    return server_with(**limits, log="debug", origins=LISTED_ORIGIN, bytes_per_s="0")  # its gauges are polled


def connect(tercet: Tercet, stack: ExitStack, receive_bytes: int | None = None) -> socket.socket:
    """
    Args:
        receive_bytes: that the kernel keeps for this client; None: its default, megabytes.
    """
    sock = stack.enter_context(socket.socket())
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(10)
    sock.connect(("127.0.0.1", tercet.port))
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as the end."""
    data = b""
    try:
        while chunk := sock.recv(1 << 16):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def gauge(tercet: Tercet, name: str) -> float:
    return metric(tercet, f"tercet_gateway_{name} ")


def test_clients_that_drip_a_request_hold_no_thread_and_get_a_408(tercet: Tercet) -> None:
    """A head, a body, a chunk, an extension and a trailer."""
    starts = (LIVE, POST + b"Content-Length: 100\r\n\r\n", CHUNKED + b"64\r\n", CHUNKED + b"5;", CHUNKED + b"0\r\nX:")
    with ExitStack() as stack:
        socks = [connect(tercet, stack) for _ in starts * 12]
        for sock, start in zip(socks, starts * 12, strict=True):
            sock.sendall(start)
        for _ in range(3):
            for sock in socks:
                sock.sendall(b"x")
            assert len(tercet.ask(length=1)["sentences"]) == 3
        assert gauge(tercet, "busy_threads") == 1  # the scrape itself
        answers = [read_to_end(sock) for sock in socks]
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        assert all(json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "request_timeout" for answer in answers)


def test_clients_that_pipeline_and_never_read_hold_no_thread_and_are_closed(tercet: Tercet) -> None:
    with ExitStack() as stack:
        # Small buffers, so that the gateway soon waits for the clients, and not for the machine.
        socks = [connect(tercet, stack, receive_bytes=4096) for _ in range(30)]
        requests = b"GET /static/page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000
        for sock in socks:
            sock.setblocking(False)
            sock.send(requests)
        until(lambda: gauge(tercet, "busy_threads") == 1, 10, "no thread left with them")
        assert len(tercet.ask(length=1)["sentences"]) == 3
        until(lambda: gauge(tercet, "open_connections") < 10, 10, "they are closed")


def test_idle_connections_beyond_the_bound_make_room_for_new_ones(tercet: Tercet) -> None:
    evicted = gauge(tercet, "evicted_connections")
    with ExitStack() as stack:
        idle = [connect(tercet, stack) for _ in range(MAX_CONNECTIONS + 50)]
        assert read_to_end(idle[0]) == b""
        assert b'{"status":"live"}' in exchange_bytes(tercet.port, LIVE + b"Connection: close\r\n\r\n")
        assert gauge(tercet, "open_connections") <= MAX_CONNECTIONS
        assert gauge(tercet, "evicted_connections") >= evicted + 50
    assert gauge(tercet, "max_connections") == MAX_CONNECTIONS


def test_requests_that_are_not_complete_count_until_they_are_answered_or_gone(tercet: Tercet) -> None:
    body = b'{"context": "' + b"a" * 50_000 + b'", "length": 1}'
    parts = [
        (LIVE + b"Cookie: a=" + b"v" * 50_000, b"\r\n\r\n"),
        (POST + b"Content-Length: %d\r\n\r\n" % len(body) + body[:-1], b"}"),
        (CHUNKED + b"%x\r\n%s\r\n" % (len(body), body), b"0\r\n\r\n"),
        (CHUNKED + b"%x\r\n%s\r\n" % (len(body), body), b"x\r\n\r\n"),
    ]
    until(lambda: gauge(tercet, "buffered_bytes") == 0, 10, "nothing waits")
    with ExitStack() as stack:
        socks = [connect(tercet, stack) for _ in parts]
        for sock, (start, _) in zip(socks, parts, strict=True):
            sock.sendall(start)
        until(lambda: gauge(tercet, "buffered_bytes") > len(parts) * 50_000, CLIENT_TIMEOUT_S, "all are counted")
        for sock, (_, end) in zip(socks, parts, strict=True):
            sock.sendall(end)
        assert [sock.recv(12)[-3:] for sock in socks] == [b"200", b"200", b"200", b"400"]
        until(lambda: gauge(tercet, "buffered_bytes") == 0, 10, "none that was answered is counted")
        gone = connect(tercet, stack)
        gone.sendall(parts[2][0])
        until(lambda: gauge(tercet, "buffered_bytes") > 50_000, CLIENT_TIMEOUT_S, "it is counted")
        gone.close()
        until(lambda: gauge(tercet, "buffered_bytes") == 0, 10, "one that is gone is not counted")


@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (CANARY + b" / HTTP/1.1\r\n" + FIELDS + b"\r\n", 400, "malformed_request"),
        (CHUNKED + b"5\r\n" + CANARY, 400, "malformed_request"),
        (CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n0\r\n\r\n") + LIVE, 400, "malformed_request"),
        (POST + b"Content-Length: 99999999\r\n\r\n" + CANARY, 413, "body_too_large"),
        (b"GET /" + b"x" * 4100 + CANARY + b" HTTP/1.1\r\n" + FIELDS + b"\r\n", 414, "url_too_long"),
        (LIVE + (b"X: " + b"x" * 1000 + b"\r\n") * 70 + CANARY, 431, "headers_too_large"),
        (b"POST /autocomplete HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n", 421, "unknown_host"),
    ],
)
def test_what_is_no_valid_request_gets_a_problem_and_reaches_no_log(
    tercet: Tercet, request_bytes: bytes, status: int, code: str
) -> None:
    """A page of a listed origin can read it, unless the host is another."""
    with ExitStack() as stack:
        sock = connect(tercet, stack)
        sock.sendall(request_bytes)
        if status == 421:  # a valid request of HTTP, whose connection stays open
            sock.shutdown(socket.SHUT_WR)
        head, _, body = read_to_end(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"application/problem+json" in head
    assert json.loads(body)["code"] == code
    assert (b"\r\naccess-control-allow-origin: " in head.lower()) == (status != 421)
    assert CANARY.decode() not in tercet.log()


@pytest.mark.integration
def test_a_draining_gateway_refuses_connections_and_ends_streams_with_an_error(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Clients that never finish a request do not delay it."""
    base = Path(tmp_path_factory.mktemp("t"))
    with ThreadPoolExecutor() as pool, ExitStack() as unfinished:
        with running(base, grace_s="3", drain_s="1", origins=LISTED_ORIGIN, test_step_delay_ms="0=100") as tercet:
            body = json.dumps({"context": "She", "length": 200, "stream": True}).encode()
            request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
            stream = pool.submit(exchange_bytes, tercet.port, request)
            until(lambda: 'in_flight_branches{slot="0"} 3.0' in tercet.client.get("/metrics").text, 10, "in flight")
            for start in (LIVE, POST + b"Content-Length: 100\r\n\r\n") * 15:
                connect(tercet, unfinished).sendall(start)
            tercet.process.terminate()
            until(lambda: tercet.client.get("/health/ready").status_code == 503, 1, "readiness off")
            tercet.client.close()

            def is_refused() -> bool:
                try:
                    return not exchange_bytes(tercet.port, LIVE + b"Connection: close\r\n\r\n")
                except ConnectionRefusedError:
                    return True

            until(is_refused, 2.5, "connections refused")
            with pytest.raises(ConnectionRefusedError):
                exchange_bytes(tercet.port, LIVE + b"\r\n")
            assert tercet.process.wait(timeout=20) == 0
        events = stream.result().decode()
    assert "event: token" in events
    assert "event: error" in events
    assert "shutting_down" in events
