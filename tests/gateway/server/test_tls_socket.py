"""TLS connections: how much a client can make the thread do that serves all of them."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.server.connections import READ_BYTES, Phase, Step
from gateway.server.tls_socket import MAX_SILENT_BYTES, RECORD_BYTES
from shared.masters.startup import server_tls
from tests.gateway.server.arrivals import advance, open_connection
from tests.tls import Certificate

BODY = bytes(range(250)) * 8
REQUEST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class TlsPeers:
    """A connection with TLS and its client, which encrypts by itself, so that records are sent when a test says so."""

    def __init__(self, certificate: Certificate) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.plain = socket.create_connection(listener.getsockname(), timeout=10)
            sock, address = listener.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        context = server_tls(certificate.cert, certificate.key).context
        self.connection = open_connection(sock, address, max_body_bytes=len(BODY), tls=context)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._client = certificate.client().wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    def advance(self) -> Step:
        """One turn of the connection, once it is ready for one."""
        select.select([self.connection], [], [], 5)
        return advance(self.connection, 0.0)

    def shake_hands(self) -> None:
        while self.connection.phase is Phase.HANDSHAKE:
            with suppress(ssl.SSLWantReadError):
                self._client.do_handshake()
            self.plain.sendall(self._outgoing.read())
            self.advance()
            if self.connection.phase is Phase.HANDSHAKE:
                self._incoming.write(self.plain.recv(1 << 16))

    def records(self, *parts: bytes) -> bytes:
        """A record of each part."""
        for part in parts:
            self._client.write(part)
        return self._outgoing.read()

    def received(self, num_bytes: int) -> bytes:
        """The next data of the server, which continues to send as it can."""
        data = b""
        while len(data) < num_bytes:
            with suppress(ssl.SSLWantReadError):
                data += self._client.read(num_bytes)
            if select.select([self.plain], [], [], 0.01)[0]:
                self._incoming.write(self.plain.recv(1 << 14))
            if self.connection.has_unsent:
                advance(self.connection, 0.0)
        return data


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[TlsPeers]:
    both = TlsPeers(Certificate(tmp_path))
    yield both
    both.plain.close()
    both.connection.close()


def test_a_turn_reads_the_socket_once_however_small_the_records_are(peers: TlsPeers) -> None:
    """A client that sent one byte in each record had the thread for as long as it sent."""
    peers.shake_hands()
    records = peers.records(*(bytes([byte]) for byte in REQUEST))
    assert len(records) > READ_BYTES
    peers.plain.sendall(records)
    assert peers.advance() is Step.WAIT_TO_READ
    assert peers.connection.has_arrived
    while peers.advance() is not Step.ANSWER:
        pass
    request = peers.connection.take_request(0.0)
    assert request.head.raw + request.body == REQUEST


def test_a_client_that_sends_no_data_is_closed(peers: TlsPeers) -> None:
    """A first message that seems to be long, a byte in each record."""
    message = b"\x01\x01\xff\xff" + b"x" * MAX_SILENT_BYTES
    peers.plain.sendall(b"".join(b"\x16\x03\x01\x00\x01" + bytes([byte]) for byte in message[: MAX_SILENT_BYTES // 3]))
    for _ in range(MAX_SILENT_BYTES // RECORD_BYTES):
        assert peers.advance() is Step.WAIT_TO_READ
    with pytest.raises(ConnectionAbortedError):
        peers.advance()


def test_a_slow_reader_gets_all_of_a_long_response(peers: TlsPeers) -> None:
    response = bytes(range(256)) * (1 << 12)  # a megabyte
    peers.shake_hands()
    peers.plain.sendall(peers.records(REQUEST))
    assert peers.advance() is Step.ANSWER
    peers.connection.take_request(0.0)
    peers.connection.response.sendall(response)
    assert peers.connection.finish_response(0.0, keeps_connection=True) is Step.WAIT_TO_WRITE
    assert peers.received(len(response)) == response


def test_an_end_that_arrives_with_the_request_closes_the_connection_after_the_response(peers: TlsPeers) -> None:
    peers.shake_hands()
    request = peers.records(REQUEST)
    with pytest.raises(ssl.SSLWantReadError):
        peers._client.unwrap()
    peers.plain.sendall(request + peers._outgoing.read())
    assert peers.advance() is Step.ANSWER
    peers.connection.take_request(0.0)
    peers.connection.response.sendall(b"answer")
    assert peers.connection.finish_response(0.0, keeps_connection=True) is Step.CLOSE
    assert peers.received(6) == b"answer"
