"""Bodies without a Content-Length and compressed ones, on every route, as clients of other languages send them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from tests.e2e.harness import exchange_bytes
from tests.e2e.shared_servers import SharedServer

CHUNKED = b"Transfer-Encoding: chunked\r\n"
# Java's HttpClient asks for HTTP/2 so; a server without it answers in HTTP/1.1 (RFC 9113, § 3.1 drops the mechanism).
H2C = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
WAYS = {"plain": b"", "h2c": H2C}
PROMPT = "The old man looked at the sea and"
BODIES: dict[str, dict[str, Any]] = {
    "/autocomplete": {"context": PROMPT, "length": 2, "seed": 1},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2, "temperature": 0},
    "/generate": {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}},
    "/generate_stream": {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}},
    "/": {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}},
    "/tokenize": {"inputs": PROMPT},
    "/jobs": {"prompt": PROMPT, "length": 2},
    "/feedback": {"id": "unknown", "index": 0, "action": "accepted", "characters": 1},
}
# A body of a megabyte comes from the address of all others.
SETTINGS = {"log": "debug", "keepalive_s": "3", "bytes_per_s": "0"}
STATUSES = {"/jobs": 202, "/feedback": 404}


@pytest.fixture
def tercet(server_with: Callable[..., SharedServer]) -> SharedServer:
    return server_with(**SETTINGS)


@pytest.fixture
def connection(tercet: SharedServer) -> Iterator[HTTPConnection]:
    """A connection, which sends what it is given and reads responses."""
    with closing(HTTPConnection("127.0.0.1", tercet.port, timeout=30)) as made:
        made.connect()
        yield made


def in_chunks(body: bytes, size: int = 11) -> bytes:
    """Chunks with extensions, and trailers, some of which would mean something in a head."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b'%x;a=b;c="d"\r\n%s\r\n' % (len(part), part) for part in parts)
    return chunks + b"0\r\nX-Checksum: 1\r\nContent-Length: 5\r\nHost: evil.example\r\n\r\n"


def head(path: str, *fields: bytes, method: str = "POST") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode() + b"".join(fields) + b"\r\n"


def ask(connection: HTTPConnection, data: bytes, method: str = "POST") -> tuple[int, str]:
    """Status and text of the response to a request; the connection may carry another."""
    connection.sock.sendall(data)
    response = HTTPResponse(connection.sock, method=method)
    response.begin()
    return response.status, response.read().decode()


@pytest.mark.parametrize("way", WAYS)
def test_every_route_takes_a_body_in_chunks(connection: HTTPConnection, way: str) -> None:
    for path, body in BODIES.items():
        status, text = ask(connection, head(path, CHUNKED, WAYS[way]) + in_chunks(json.dumps(body).encode()))
        assert status == STATUSES.get(path, 200), (path, text)
    # What no route reads changes nothing.
    for method, path, status in (
        ("GET", "/health/live", 200),
        ("HEAD", "/info", 200),
        ("DELETE", "/jobs/unknown", 404),
        ("OPTIONS", "/autocomplete", 200),
        ("GET", "/autocomplete", 405),
    ):
        found, _ = ask(connection, head(path, CHUNKED, WAYS[way], method=method) + in_chunks(b"{}"), method)
        assert found == status, (method, path)


def test_a_body_compressed_with_gzip_is_decompressed(connection: HTTPConnection) -> None:
    body = gzip.compress(json.dumps(BODIES["/autocomplete"]).encode())
    for framing, sent in ((b"Content-Length: %d\r\n" % len(body), body), (CHUNKED, in_chunks(body))):
        status, text = ask(connection, head("/autocomplete", framing, b"Content-Encoding: gzip\r\n") + sent)
        assert status == 200, text


def test_health_checks_need_no_host(tercet: SharedServer) -> None:
    for request in (
        b"GET /health/ready HTTP/1.0\r\n\r\n",
        b"GET /health/live HTTP/1.0\r\nHost: tercet.default.svc\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nHost: 10.0.0.7:8000\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"HEAD /healthz HTTP/1.0\r\nHost: a b\r\n\r\n",
    ):
        assert b" 200 " in exchange_bytes(tercet.port, request)[:13], request
    assert b" 400 " in exchange_bytes(tercet.port, b"GET /info HTTP/1.1\r\nConnection: close\r\n\r\n")[:13]
    assert b" 421 " in exchange_bytes(tercet.port, b"GET /info HTTP/1.0\r\n\r\n")[:13]
