"""Bodies without a Content-Length and compressed ones, on every route, as clients of other languages send them."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.harness import Tercet
from tests.e2e.shared_servers import SharedServer
from tests.tls import Certificate

CHUNKED = b"Transfer-Encoding: chunked\r\n"
# Java's HttpClient asks for HTTP/2 so; a server without it answers in HTTP/1.1 (RFC 9113, § 3.1 drops the mechanism).
H2C = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
WAYS = {"plain": b"", "h2c": H2C}
BOMB = gzip.compress(b" " * (50 << 20))
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
# Bodies of megabytes come from one address, one after the other.
SETTINGS = {"log": "debug", "keepalive_s": "5", "client_timeout_s": "4", "bytes_per_s": "0"}
STATUSES = {"/jobs": 202, "/feedback": 404}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("c"))


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
        server = server_with(certificate, client_timeout_s="1", bytes_per_s="0")
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


def exchange(tercet: Tercet, *parts: bytes) -> bytes:
    """All that the server sends until it closes; each part is a write of its own."""
    with socket.create_connection(("127.0.0.1", tercet.port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b""
        try:
            for part in parts:
                sock.sendall(part)
            while received := sock.recv(1 << 16):
                data += received
        except ConnectionError:
            pass
        return data


@pytest.mark.parametrize("way", WAYS)
def test_every_route_takes_a_body_in_chunks(connection: HTTPConnection, way: str) -> None:
    for path, body in BODIES.items():
        status, text = ask(connection, head(path, CHUNKED, WAYS[way]) + in_chunks(json.dumps(body).encode()))
        assert status == STATUSES.get(path, 200), (path, text)


def test_a_text_in_chunks_is_the_text(connection: HTTPConnection) -> None:
    body = json.dumps(BODIES["/autocomplete"] | {"context": "Ein Bär — " * 500}, ensure_ascii=False).encode()
    _, text = ask(connection, head("/autocomplete", b"Content-Length: %d\r\n" % len(body)) + body)
    for size in (1, 7, 1 << 20):
        _, same = ask(connection, head("/autocomplete", CHUNKED) + in_chunks(body, size))
        assert values(json.loads(same)) == values(json.loads(text))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunks", [b"0\r\n\r\n", b"000;last\r\nX: y\r\n\r\n", b"2\r\n{}\r\n0\r\n\r\n"])
def test_a_body_in_chunks_that_no_route_reads_changes_nothing(
    connection: HTTPConnection, chunks: bytes, way: str
) -> None:
    for method, path, status in (
        ("GET", "/health/live", 200),
        ("GET", "/v1/models", 200),
        ("HEAD", "/info", 200),
        ("DELETE", "/jobs/unknown", 404),
        ("GET", "/jobs/unknown", 404),
        ("OPTIONS", "/autocomplete", 200),
        ("GET", "/autocomplete", 405),
    ):
        found, _ = ask(connection, head(path, CHUNKED, WAYS[way], method=method) + chunks, method)
        assert found == status, (method, path)


@pytest.mark.parametrize("path", ["/autocomplete", "/v1/completions", "/jobs", "/feedback", "/", "/health/live"])
def test_a_body_in_chunks_above_the_limit_is_refused_while_it_is_sent(tercet: SharedServer, path: str) -> None:
    chunk = b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"
    answer = exchange(tercet, head(path, CHUNKED), *[chunk] * 17)  # and no end
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"TERCET_MAX_BODY_BYTES" in answer
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (CHUNKED + b"Content-Length: 5\r\n", b"0\r\n\r\n"),
        (b"Transfer-Encoding: gzip, chunked\r\n", b"0\r\n\r\n"),
        (CHUNKED, b"2\r\n{}0\r\n\r\n"),
        (CHUNKED, b"1;" + b"x" * 5000),
        (CHUNKED, b"0\r\n" + CANARY + b"\r\n\r\n"),
    ],
)
def test_a_body_whose_end_is_in_doubt_is_a_400_and_nothing_after_it_is_a_request(
    tercet: SharedServer, fields: bytes, body: bytes
) -> None:
    answer = exchange(tercet, head("/autocomplete", fields), body, head("/health/live", method="GET") + CANARY)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"code":"malformed_request"' in answer
    assert CANARY.decode() not in tercet.log()


@pytest.mark.parametrize("path", ["/autocomplete", "/v1/completions", "/jobs", "/tokenize"])
def test_a_body_compressed_with_gzip_is_decompressed(connection: HTTPConnection, path: str) -> None:
    body = gzip.compress(json.dumps(BODIES[path]).encode())
    for framing, sent in ((b"Content-Length: %d\r\n" % len(body), body), (CHUNKED, in_chunks(body))):
        status, text = ask(connection, head(path, framing, b"Content-Encoding: gzip\r\n") + sent)
        assert status == STATUSES.get(path, 200), text


def test_other_codings_and_bombs_are_refused(connection: HTTPConnection) -> None:
    for coding, body, status in ((b"br", b"{}", 415), (b"gzip", b"{}", 400), (b"gzip", BOMB, 413)):
        fields = b"Content-Encoding: %s\r\nContent-Length: %d\r\n" % (coding, len(body))
        assert ask(connection, head("/v1/completions", fields) + body)[0] == status


def test_health_checks_need_no_host(tercet: SharedServer) -> None:
    for request in (
        b"GET /health/ready HTTP/1.0\r\n\r\n",
        b"GET /health/live HTTP/1.0\r\nHost: tercet.default.svc\r\n\r\n",
        b"GET /ping HTTP/1.1\r\nHost: 10.0.0.7:8000\r\nConnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"HEAD /healthz HTTP/1.0\r\nHost: a b\r\n\r\n",
    ):
        assert b" 200 " in exchange(tercet, request)[:13], request
    assert b" 400 " in exchange(tercet, b"GET /info HTTP/1.1\r\nConnection: close\r\n\r\n")[:13]
    assert b" 421 " in exchange(tercet, b"GET /info HTTP/1.0\r\n\r\n")[:13]


def test_an_idle_connection_is_closed_after_the_time_that_is_set(tercet: SharedServer) -> None:
    assert exchange(tercet, head("/health/live", method="GET")).startswith(b"HTTP/1.1 200 ")  # and reads to the end


# Clients of other languages.


def test_a_net_client(tercet: SharedServer) -> None:
    """The bytes and writes of `HttpClient.PostAsJsonAsync` in .NET 8, which is not installed here."""
    body = json.dumps(BODIES["/v1/completions"]).encode()
    answer = exchange(
        tercet,
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
