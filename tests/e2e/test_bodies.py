"""Bodies without a Content-Length and compressed ones, on every route, as clients of other languages send them."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import exchange_bytes
from tests.e2e.shared_servers import SharedServer
from tests.tls import Certificate

CHUNKED = b"Transfer-Encoding: chunked\r\n"
# Java's HttpClient asks for HTTP/2 so; a server without it answers in HTTP/1.1 (RFC 9113, § 3.1 drops the mechanism).
H2C = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
WAYS = {"plain": b"", "h2c": H2C}
CANARY = b"xyzzy-canary"
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


@pytest.fixture(params=["http", "https"])
def connection(
    request: pytest.FixtureRequest, server_with: Callable[..., SharedServer], certificate: Certificate
) -> Iterator[HTTPConnection]:
    """A connection, which sends what it is given and reads responses."""
    if request.param == "http":
        server = server_with(**SETTINGS)
        made = HTTPConnection("127.0.0.1", server.port, timeout=30)
    else:
        server = server_with(certificate)
        made = HTTPSConnection("127.0.0.1", server.port, timeout=30, context=certificate.client())
    with closing(made):
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


def values(answer: dict[str, Any]) -> list[str]:
    return [sentence["value"] for sentence in answer["sentences"]]


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


def test_a_body_in_chunks_above_the_limit_is_refused_while_it_is_sent(tercet: SharedServer) -> None:
    chunk = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
    answer = exchange_bytes(tercet.port, head("/jobs", CHUNKED), *[chunk] * 17)  # and no end
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"TERCET_MAX_BODY_BYTES" in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("fields", [CHUNKED + b"Content-Length: 5\r\n", CHUNKED])
def test_a_body_whose_end_is_in_doubt_is_a_400_and_nothing_after_it_is_a_request(
    tercet: SharedServer, fields: bytes
) -> None:
    """tests/gateway/server/test_request_parser.py has all that is in doubt."""
    rest = b"0\r\n" + CANARY + b"\r\n\r\n" + head("/health/live", method="GET")
    answer = exchange_bytes(tercet.port, head("/autocomplete", fields), rest)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"code":"malformed_request"' in answer
    assert CANARY.decode() not in tercet.log()


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


# Clients of other languages.


def test_a_net_client(tercet: SharedServer) -> None:
    """The bytes and writes of `HttpClient.PostAsJsonAsync` in .NET 8, which is not installed here. It reads until the
    idle connection is closed."""
    body = json.dumps(BODIES["/v1/completions"]).encode()
    answer = exchange_bytes(
        tercet.port,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost:%d\r\nTransfer-Encoding: chunked\r\n" % tercet.port
        + b"Content-Type: application/json; charset=utf-8\r\n\r\n",
        b"%X\r\n" % len(body),
        body,
        b"\r\n",
        b"0\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"object":"text_completion"' in answer


def test_generators_as_bodies_of_requests_and_httpx(tercet: SharedServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield from (piece.encode() for piece in json.JSONEncoder().iterencode(BODIES["/autocomplete"]))

    expected = values(tercet.client.post("/autocomplete", json=BODIES["/autocomplete"]).json())
    with requests.Session() as session:
        session.trust_env = False
        assert values(session.post(f"{tercet.url}/autocomplete", data=pieces()).json()) == expected
    for headers in ({}, {"Expect": "100-continue"}):
        answer = tercet.client.post("/autocomplete", content=pieces(), headers=headers)
        assert values(answer.json()) == expected


NODE = """
const body = new ReadableStream({
    start(controller) {
        for (const piece of process.argv[2].match(/.{1,9}/g)) controller.enqueue(new TextEncoder().encode(piece));
        controller.close();
    }
});
const answer = await fetch(process.argv[1], {method: "POST", body, duplex: "half"});
console.log(answer.status, await answer.text());
"""


@pytest.mark.skipif(not shutil.which("node"), reason="no node")
def test_a_stream_as_the_body_of_fetch_in_node(tercet: SharedServer) -> None:
    command = ["node", "--input-type=module", "--eval", NODE, "--", f"{tercet.url}/v1/completions"]
    printed = subprocess.run(
        [*command, json.dumps(BODIES["/v1/completions"])], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert printed.startswith("200 "), printed
    assert '"object":"text_completion"' in printed


JAVA = """
import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

public class Post {
    public static void main(String[] arguments) throws Exception {
        byte[] body = arguments[1].getBytes("UTF-8");
        HttpClient client = HttpClient.newHttpClient();  // asks for HTTP/2 by an upgrade to h2c
        for (var publisher : new HttpRequest.BodyPublisher[] {
            HttpRequest.BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body)),
            HttpRequest.BodyPublishers.ofByteArray(body)
        }) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0])).POST(publisher).build();
            System.out.println(client.send(request, HttpResponse.BodyHandlers.ofString()).statusCode());
        }
    }
}
"""


@pytest.mark.skipif(not shutil.which("java"), reason="no java")
def test_javas_http_client_with_a_stream_and_an_upgrade_to_h2c(tercet: SharedServer, tmp_path: Path) -> None:
    source = tmp_path / "Post.java"
    source.write_text(JAVA)
    command = ["java", str(source), f"{tercet.url}/autocomplete", json.dumps(BODIES["/autocomplete"])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.split() == ["200", "200"], run
