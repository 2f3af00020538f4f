"""What the workers' gunicorn class adds to a connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from workers.gunicorn_worker import HoldingSocket

HEAD, CHUNK, LAST_CHUNK = b"HTTP/1.1 200 OK\r\n\r\n", b"3\r\nab\n\r\n", b"0\r\n\r\n"


@pytest.fixture
def pair() -> Iterator[tuple[HoldingSocket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.setblocking(False)
    with ours, theirs:
        yield HoldingSocket(ours), theirs


def heard(theirs: socket.socket) -> bytes:
    try:
        return theirs.recv(1 << 16)
    except BlockingIOError:
        return b""


def test_the_head_goes_with_what_follows_it(pair: tuple[HoldingSocket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(HEAD)
    assert heard(theirs) == b""
    ours.sendall(CHUNK)
    assert heard(theirs) == HEAD + CHUNK
    ours.sendall(CHUNK)
    assert heard(theirs) == CHUNK


def test_the_end_is_held_together(pair: tuple[HoldingSocket, socket.socket]) -> None:
    ours, theirs = pair
    ours.hold()
    ours.sendall(CHUNK)
    assert heard(theirs) == b""
    ours.sendall(LAST_CHUNK)
    assert heard(theirs) == CHUNK + LAST_CHUNK


def test_a_head_alone_goes_at_the_end(pair: tuple[HoldingSocket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(HEAD)
    ours.flush()
    ours.flush()
    assert heard(theirs) == HEAD
    assert ours.fileno() == ours.socket.fileno()
