"""Connections: where a request ends, and what a slow or hostile client can hold."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from gateway.server.connections import (
    LINGER_BYTES,
    MAX_HEAD_BYTES,
    MAX_UNSENT_BYTES,
    READ_BYTES,
    Connection,
    Phase,
    Step,
)

MAX_BODY_BYTES = 1000
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
        self.connection = Connection(sock, address, ("127.0.0.1", 0), now=0.0, max_body_bytes=MAX_BODY_BYTES, tls=None)

    def send(self, data: bytes, now: float = 0.0) -> Step:
        """Send as the client; returns the last step of the connection once it has read everything."""
        self.client.sendall(data)
        return self.settle(now)

    def settle(self, now: float = 0.0) -> Step:
        """Advance while the connection waits and data may still arrive."""
        deadline = time.monotonic() + 0.2
        step = self.connection.advance(now)
        while step is Step.WAIT_TO_READ and time.monotonic() < deadline:
            time.sleep(0.005)
            step = self.connection.advance(now)
        return step

    def answer(self, response: bytes, now: float = 0.0, *, keeps_connection: bool = True) -> tuple[bytes, Step]:
        """What a thread does with a complete request."""
        request = self.connection.take_request(now)
        self.connection.response.sendall(response)
        return bytes(request), self.connection.finish_response(now, keeps_connection=keeps_connection)


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
    assert peers.answer(b"HTTP/1.1 204 No Content\r\n\r\n") == (request, Step.WAIT_TO_READ)
    assert peers.client.recv(100) == b"HTTP/1.1 204 No Content\r\n\r\n"
    assert peers.connection.phase.name == "IDLE"


def test_pipelined_requests_are_answered_one_after_another(peers: Peers) -> None:
    first, second, third = post(b"one"), GET, post(b"three")
    assert peers.send(first + second + third[:20]) is Step.ANSWER
    assert peers.answer(b"1") == (first, Step.ANSWER)
    assert peers.answer(b"2") == (second, Step.WAIT_TO_READ)
    assert peers.send(third[20:]) is Step.ANSWER
    assert peers.answer(b"3", keeps_connection=False)[0] == third
    assert peers.client.recv(10) == b"123"
    assert peers.client.recv(10) == b""


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ((b"Content-Length: 5",), b"5"),
        ((b"content-length : 5",), b"5"),
        ((), b"+5"),
        ((), b"5, 5"),
        ((), b"0x5"),
        ((), b""),
        ((), "٥".encode()),
        ((), b"1001"),
        ((), b"9" * 30),
        ((b"X: y", b" Content-Length: 7"), b"5"),  # obsolete folding: a continuation or a field, by parser
    ],
)
def test_a_body_of_doubtful_or_excessive_length_is_not_read_and_ends_the_connection(
    peers: Peers, fields: tuple[bytes, ...], length: bytes
) -> None:
    request = post(b"hello", *fields, length=length)
    assert peers.send(request) is Step.ANSWER
    assert peers.connection.is_last_request
    head, step = peers.answer(b"no")
    assert head == request[: -len(b"hello")]
    assert step is Step.WAIT_TO_READ
    assert peers.connection.phase is Phase.LINGERING
    assert peers.client.recv(10) == b"no"
    assert peers.client.recv(10) == b""


def chunked(body: bytes, *fields: bytes, method: bytes = b"POST") -> bytes:
    head = [method + b" / HTTP/1.1", b"Host: localhost", b"Transfer-Encoding: chunked", *fields]
    return b"\r\n".join([*head, b"", body])


@pytest.mark.parametrize("method", [b"POST", b"GET", b"DELETE"])
def test_a_body_in_chunks_is_handed_over_with_its_length_as_if_it_had_been_sent_so(peers: Peers, method: bytes) -> None:
    first = chunked(b"2;a=b\r\n{}\r\n1\r\n \r\n0\r\nX: y\r\n\r\n", b"Accept: */*", method=method)
    second = chunked(b"0\r\n\r\n", method=method)
    for byte in first[:-1]:
        peers.client.sendall(bytes([byte]))
    assert peers.settle(1.0) is Step.WAIT_TO_READ
    began_at = peers.connection.since
    assert peers.send(first[-1:] + second + GET, 9.0) is Step.ANSWER
    assert peers.connection.since == began_at  # the time that a client has is that of the whole request
    assert not peers.connection.is_last_request
    head = method + b" / HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    assert peers.answer(b"1") == (head + b"3\r\nAccept: */*\r\n\r\n{} ", Step.ANSWER)
    assert peers.answer(b"2") == (head + b"0\r\n\r\n", Step.ANSWER)
    assert peers.answer(b"3") == (GET, Step.WAIT_TO_READ)


def test_a_body_in_chunks_that_is_too_large_is_answered_while_it_arrives_and_not_kept(peers: Peers) -> None:
    chunk = b"64\r\n" + b"x" * 100 + b"\r\n"
    assert peers.send(chunked(chunk * 10)) is Step.WAIT_TO_READ
    assert MAX_BODY_BYTES <= peers.connection.num_buffered_bytes <= MAX_BODY_BYTES + 100
    assert peers.send(chunk) is Step.ANSWER
    assert peers.connection.is_last_request
    request, step = peers.answer(b"no")
    assert request == b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1001\r\n\r\n"
    assert (step, peers.connection.phase) == (Step.WAIT_TO_READ, Phase.LINGERING)


@pytest.mark.parametrize(
    "fields",
    [
        (b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        (b"Content-Length: 5", b"transfer-encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
        (b"Transfer-Encoding: chunked, chunked",),
        (b"Transfer-Encoding: gzip, chunked",),
        (b"Transfer-Encoding: chunked, identity",),
        (b"Transfer-Encoding: identity",),
        (b"Transfer-Encoding: xchunked",),
        (b"Transfer-Encoding: \x0bchunked",),
        (b"Transfer-Encoding: chunked;q=1",),
        (b'Transfer-Encoding: "chunked"',),
        (b"Transfer-Encoding:",),
        (b"Transfer-Encoding : chunked",),
        (b"X: y", b" Transfer-Encoding: chunked"),
        (b"X: y\nTransfer-Encoding: chunked",),
        (b"Transfer-Encoding:", b" chunked"),
    ],
)
def test_any_other_transfer_encoding_is_refused_unread(peers: Peers, fields: tuple[bytes, ...]) -> None:
    assert peers.send(b"\r\n".join([b"POST / HTTP/1.1", *fields, b"", b"0\r\n\r\n"])) is Step.REFUSE_BODY
    assert "Transfer-Encoding must be `chunked` alone" in peers.connection.refusal


def test_a_body_in_chunks_is_refused_in_http_1_0(peers: Peers) -> None:
    assert peers.send(chunked(b"0\r\n\r\n").replace(b"HTTP/1.1", b"HTTP/1.0")) is Step.REFUSE_BODY


def test_a_body_that_is_not_in_chunks_as_its_head_says_is_refused(peers: Peers) -> None:
    assert peers.send(chunked(b"5\r\nhello")) is Step.WAIT_TO_READ
    assert peers.send(b"GET / HTTP/1.1\r\n\r\n") is Step.REFUSE_BODY
    assert "does not end with CRLF" in peers.connection.refusal


def test_little_of_a_refused_upload_is_read(peers: Peers) -> None:
    peers.client.settimeout(0.2)
    assert READ_BYTES + LINGER_BYTES <= 64 << 10
    peers.client.sendall(post(b"", length=b"1000000000"))
    assert peers.settle() is Step.ANSWER
    peers.answer(b"no")

    def upload() -> None:
        for _ in range(100_000):
            peers.client.send(b"x" * 4096)
            peers.connection.advance(0.0)

    with pytest.raises((TimeoutError, BrokenPipeError)):  # the client is stopped by flow control
        upload()
    assert peers.client.recv(10) == b"no"


def test_a_head_with_64_kib_of_fields_is_complete_and_a_longer_one_refused(peers: Peers) -> None:
    line = b"X: " + b"x" * 1019 + b"\r\n"
    head = b"GET /" + b"a" * 4000 + b" HTTP/1.1\r\n" + line * 64 + b"\r\n"
    assert peers.send(head) is Step.ANSWER
    assert peers.answer(b"ok")[0] == head
    assert peers.send(head[:-2]) is Step.WAIT_TO_READ
    assert peers.send(line) is Step.REFUSE_HEAD
    assert peers.connection.num_buffered_bytes <= MAX_HEAD_BYTES + len(line)


def test_the_continue_that_a_client_expects_is_sent_once(peers: Peers) -> None:
    request = post(b"hello", b"Expect: 100-continue")
    assert peers.send(request[:-5]) is Step.WAIT_TO_READ
    assert peers.client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert peers.send(request[-5:]) is Step.ANSWER
    assert peers.answer(b"ok") == (request, Step.WAIT_TO_READ)
    assert peers.client.recv(100) == b"ok"


def test_the_continue_before_chunks_is_sent_once(peers: Peers) -> None:
    request = chunked(b"5\r\nhello\r\n0\r\n\r\n", b"Expect: 100-Continue")
    assert peers.send(request[:-15]) is Step.WAIT_TO_READ
    assert peers.client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert peers.send(request[-15:-5]) is Step.WAIT_TO_READ
    assert peers.send(request[-5:]) is Step.ANSWER
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
    request, step = peers.answer(response)
    assert (request, step) == (GET, Step.WAIT_TO_WRITE)
    assert peers.connection.phase is not Phase.ANSWERING
    received = bytearray()
    while len(received) < len(response):
        received += peers.client.recv(1 << 14)
        if step is not Step.ANSWER:
            step = peers.connection.advance(1.0)
    assert received == response
    assert step is Step.ANSWER  # the second request, which had to wait for the first response


def test_time_counts_from_the_last_byte_that_a_slow_reader_takes(peers: Peers) -> None:
    assert peers.send(GET) is Step.ANSWER
    peers.answer(b"x" * (1 << 20), now=1.0)
    peers.connection.advance(2.0)
    assert peers.connection.since == 1.0
    peers.client.recv(1 << 20)
    time.sleep(0.05)
    peers.connection.advance(3.0)
    assert peers.connection.since == 3.0


def test_a_response_that_nothing_reads_is_bounded_in_memory(peers: Peers) -> None:
    assert peers.send(GET) is Step.ANSWER
    peers.connection.take_request(0.0)
    for _ in range(MAX_UNSENT_BYTES // (1 << 16)):
        peers.connection.response.sendall(b"x" * (1 << 16))
    with pytest.raises(BrokenPipeError):
        peers.connection.response.sendall(b"x" * (1 << 20))


def test_the_head_leaves_with_the_first_bytes_of_the_body_or_alone_at_the_end(peers: Peers) -> None:
    peers.send(GET)
    peers.connection.take_request(0.0)
    peers.client.settimeout(0.05)
    peers.connection.response.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(TimeoutError):
        peers.client.recv(100)
    peers.connection.response.sendall(b"body")
    assert peers.client.recv(100) == b"HTTP/1.1 200 OK\r\n\r\nbody"
    peers.connection.finish_response(0.0, keeps_connection=True)
    peers.send(GET)
    peers.answer(b"HTTP/1.1 304 Not Modified\r\n\r\n")
    assert peers.client.recv(100) == b"HTTP/1.1 304 Not Modified\r\n\r\n"


def test_a_client_that_closes_ends_the_connection(peers: Peers) -> None:
    assert peers.send(GET[:10]) is Step.WAIT_TO_READ
    peers.client.close()
    assert peers.settle() is Step.CLOSE
