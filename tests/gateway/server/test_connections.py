"""Connections: phases, and what a slow or hostile client can hold."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from gateway.server.connections import (
    LINGER_BYTES,
    MAX_UNSENT_BYTES,
    READ_BYTES,
    Phase,
    Step,
)
from shared.errors import MalformedRequest, QuotaExceeded
from tests.gateway.server.arrivals import admitted, advance, open_connection

MAX_BODY_BYTES = 1000
MAX_CHARGED = 5000  # of bodies in chunks, with what frames them
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes, *fields: bytes, length: bytes | None = None) -> bytes:
    head = [b"POST / HTTP/1.1", b"Host: localhost", *fields]
    head.append(b"Content-Length: " + (b"%d" % len(body) if length is None else length))
    return b"\r\n".join([*head, b"", body])


class Peers:
    """A connection and its client. The client's buffers are small, so that a client that does not read is soon felt."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.socket()
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            self.client.connect(listener.getsockname())
            sock, address = listener.accept()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        self.client.settimeout(2)
        self.connection = open_connection(sock, address, max_body_bytes=MAX_BODY_BYTES, max_charged=MAX_CHARGED)

    def send(self, data: bytes, now: float = 0.0) -> Step:
        """Send as the client; returns the last step of the connection once it has read everything."""
        self.client.sendall(data)
        return self.settle(now)

    def settle(self, now: float = 0.0) -> Step:
        """Advance while the connection waits and data may still arrive."""
        deadline = time.monotonic() + 0.2
        step = advance(self.connection, now)
        while step is Step.WAIT_TO_READ and time.monotonic() < deadline:
            time.sleep(0.005)
            step = advance(self.connection, now)
        return step

    def answer(self, response: bytes, now: float = 0.0, *, keeps_connection: bool = True) -> tuple[bytes, Step]:
        """What a thread does with a complete request. Returns its body, and the step after the response."""
        request = self.connection.take_request(now)
        self.connection.response.sendall(response)
        step = self.connection.finish_response(now, keeps_connection=keeps_connection & request.keeps_connection)
        return request.body, admitted(self.connection, step)


@pytest.fixture
def peers() -> Iterator[Peers]:
    both = Peers()
    yield both
    both.client.close()
    both.connection.close()


def test_a_request_that_arrives_byte_by_byte_is_answered_when_it_is_complete(peers: Peers) -> None:
    request = post(b'{"context": "a"}')
    for byte in request[:-1]:
        peers.client.sendall(bytes([byte]))
    assert peers.settle() is Step.WAIT_TO_READ
    assert peers.connection.phase is Phase.READING
    assert peers.send(request[-1:]) is Step.ANSWER
    assert peers.answer(b"HTTP/1.1 204 No Content\r\n\r\n") == (b'{"context": "a"}', Step.WAIT_TO_READ)
    assert peers.client.recv(100) == b"HTTP/1.1 204 No Content\r\n\r\n"
    assert peers.connection.phase.name == "IDLE"


def test_pipelined_requests_are_answered_one_after_another(peers: Peers) -> None:
    first, second, third = post(b"one"), GET, post(b"three")
    assert peers.send(first + second + third[:20]) is Step.ANSWER
    assert peers.answer(b"1") == (b"one", Step.ANSWER)
    assert peers.connection.is_pipelining
    assert peers.answer(b"2") == (b"", Step.WAIT_TO_READ)
    assert peers.send(third[20:]) is Step.ANSWER
    assert peers.answer(b"3", keeps_connection=False)[0] == b"three"
    assert peers.client.recv(10) == b"123"
    assert peers.client.recv(10) == b""


def chunked(body: bytes, *fields: bytes) -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", b"Host: localhost", b"Transfer-Encoding: chunked", *fields, b"", body])


def test_an_error_behind_a_request_ends_the_connection_after_its_answer(peers: Peers) -> None:
    assert peers.send(chunked(b"2\r\n{}\r\n0\r\n\r\n") + b"GET / HTTP/9\r\n\r\n") is Step.ANSWER
    assert peers.connection.refusal is None
    assert peers.answer(b"1") == (b"{}", Step.REFUSE)
    assert isinstance(peers.connection.refusal, MalformedRequest)
    assert peers.client.recv(10) == b"1"


def test_nothing_is_read_while_a_request_is_answered(peers: Peers) -> None:
    assert peers.send(GET) is Step.ANSWER
    peers.connection.take_request(0.0)
    peers.client.sendall(GET)
    assert advance(peers.connection, 0.0) is Step.NOTHING
    assert peers.connection.parser.num_bytes == 0
    assert peers.connection.has_arrived


def test_the_time_that_a_client_has_is_that_of_the_whole_request(peers: Peers) -> None:
    request = chunked(b"2\r\n{}\r\n0\r\n\r\n")
    assert peers.send(request[:-1], 1.0) is Step.WAIT_TO_READ
    assert peers.connection.parser.num_bytes == request.index(b"2\r\n{}") + 2
    assert peers.send(request[-1:], 9.0) is Step.ANSWER
    assert peers.connection.since == 1.0


@pytest.mark.parametrize(
    "request_bytes",
    [post(b"hello", length=b"1001"), chunked(b"400\r\n" + b"x" * 1001)],
)
def test_a_body_that_is_too_long_is_answered_while_it_arrives_and_ends_the_connection(
    peers: Peers, request_bytes: bytes
) -> None:
    assert peers.send(request_bytes) is Step.ANSWER
    assert peers.answer(b"no") == (b"", Step.WAIT_TO_READ)
    assert peers.connection.phase is Phase.LINGERING
    assert peers.client.recv(10) == b"no"
    assert peers.client.recv(10) == b""


def test_a_body_in_chunks_is_refused_when_its_owner_may_send_no_more(peers: Peers) -> None:
    request = chunked(b"1;xxxxxxxx\r\nx\r\n" * 500)
    steps = [peers.send(request[start : start + 1000]) for start in range(0, MAX_CHARGED, 1000)]
    assert set(steps) == {Step.WAIT_TO_READ}
    assert peers.send(request[MAX_CHARGED:]) is Step.REFUSE
    assert isinstance(peers.connection.refusal, QuotaExceeded)


def test_little_of_a_refused_upload_is_read(peers: Peers) -> None:
    peers.client.settimeout(0.2)
    assert READ_BYTES + LINGER_BYTES <= 64 << 10
    peers.client.sendall(post(b"", length=b"1000000000"))
    assert peers.settle() is Step.ANSWER
    peers.answer(b"no")

    def upload() -> None:
        for _ in range(100_000):
            peers.client.send(b"x" * 4096)
            advance(peers.connection, 0.0)

    with pytest.raises((TimeoutError, BrokenPipeError)):  # the client is stopped by flow control
        upload()
    assert peers.client.recv(10) == b"no"


@pytest.mark.parametrize("make", [lambda field: post(b"hello", field), lambda field: chunked(b"0\r\n\r\n", field)])
def test_the_continue_that_a_client_expects_is_sent_once(peers: Peers, make: Callable[[bytes], bytes]) -> None:
    request = make(b"Expect: 100-Continue")
    assert peers.send(request[:-5]) is Step.WAIT_TO_READ
    assert peers.client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert peers.send(request[-5:-2]) is Step.WAIT_TO_READ
    assert peers.send(request[-2:]) is Step.ANSWER
    peers.answer(b"ok")
    assert peers.client.recv(100) == b"ok"


def test_http_1_0_has_no_continue(peers: Peers) -> None:
    request = post(b"hello", b"Expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0")
    assert peers.send(request[:-5]) is Step.WAIT_TO_READ
    assert peers.send(request[-5:]) is Step.ANSWER
    peers.answer(b"ok")
    assert peers.client.recv(100) == b"ok"


def test_a_slow_reader_holds_memory_and_no_thread_and_gets_everything(peers: Peers) -> None:
    response = bytes(range(256)) * (1 << 12)  # a megabyte
    assert peers.send(GET + GET) is Step.ANSWER
    _, step = peers.answer(response)
    assert step is Step.WAIT_TO_WRITE
    assert peers.connection.phase is not Phase.ANSWERING
    received = bytearray()
    while len(received) < len(response):
        received += peers.client.recv(1 << 14)
        if step is not Step.ANSWER:
            step = advance(peers.connection, 1.0)
    assert received == response
    assert step is Step.ANSWER  # the second request, which had to wait for the first response


def test_time_counts_from_the_last_byte_that_a_slow_reader_takes(peers: Peers) -> None:
    assert peers.send(GET) is Step.ANSWER
    peers.answer(b"x" * (1 << 20), now=1.0)
    advance(peers.connection, 2.0)
    assert peers.connection.since == 1.0
    peers.client.recv(1 << 20)
    time.sleep(0.05)
    advance(peers.connection, 3.0)
    assert peers.connection.since == 3.0


def test_a_response_that_nothing_reads_is_bounded_in_memory(peers: Peers) -> None:
    assert peers.send(GET) is Step.ANSWER
    peers.connection.take_request(0.0)
    for _ in range(MAX_UNSENT_BYTES // (1 << 16)):
        peers.connection.response.sendall(b"x" * (1 << 16))
    with pytest.raises(BrokenPipeError):
        peers.connection.response.sendall(b"x" * (1 << 20))


def test_a_client_that_closes_ends_the_connection(peers: Peers) -> None:
    assert peers.send(GET[:10]) is Step.WAIT_TO_READ
    peers.client.close()
    assert peers.settle() is Step.CLOSE
