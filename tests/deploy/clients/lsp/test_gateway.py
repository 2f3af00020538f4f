"""What a server can do to the language server: answers without an end, too slow ones, and times to wait."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import time
from typing import Any

import pytest

from deploy.clients.lsp import gateway
from deploy.clients.lsp.gateway import Gateway, Problem, Superseded
from tests.gateway.pool.helpers import Answer, sends, serving_tcp

OPTIONS = {"headers": {"Connection": "close"}, "verify": True, "trust_env": False}


def problem(answer: Answer, kind: type[Problem] | type[Superseded] = Problem) -> tuple[Any, float]:
    """What a request to a server that answers so raises, and after how many seconds."""

    async def ask(url: str) -> None:
        await Gateway({**OPTIONS, "base_url": url}, url).report_acceptance("a", 0, 1)

    with serving_tcp(answer) as server:
        began = time.monotonic()
        with pytest.raises(kind) as caught:
            asyncio.run(ask(f"http://{server.address}"))
        return caught.value, time.monotonic() - began


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")


def dripping(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.1)


def refusing(retry_after: str, body: bytes = b'{"code": "queue_full", "detail": "%s"}' % (b"Later. " * 1000)) -> Answer:
    head = f"HTTP/1.1 503 Later\r\nRetry-After: {retry_after}\r\nContent-Length: {len(body)}\r\n"
    encoding = "Content-Encoding: gzip\r\n" if body.startswith(b"\x1f") else ""
    return sends(f"{head}{encoding}\r\n".encode() + body)


def test_an_answer_without_an_end_and_a_slow_one_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its answer does not end" in str(problem(endless)[0])
    monkeypatch.setattr(gateway, "TIMEOUT_S", 1.0)
    error, seconds = problem(dripping)
    assert "does not answer in time" in str(error)
    assert seconds < 8


def test_a_superseded_request_is_no_problem() -> None:
    body = b'{"code": "superseded", "detail": "A newer request came."}'
    problem(sends(b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n" % len(body) + body), Superseded)


@pytest.mark.parametrize(
    "body", [gzip.compress(b'{"code": "a", "detail": "b"}'), b'{"a":' + b"[" * 100_000], ids=["compressed", "nested"]
)
def test_what_is_compressed_unasked_or_nested_too_deeply_is_not_tercet(body: bytes) -> None:
    assert "is not Tercet" in str(problem(refusing("1", body))[0])


@pytest.mark.parametrize(
    ("sent", "used_s"),
    [
        ("30", 30),
        ("99999999999", 60),
        ("9" * 400, 60),
        ("-3", 1),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 1),
        ("x", 1),
        ("", 1),
    ],
)
def test_the_time_to_wait_is_bounded(sent: str, used_s: float) -> None:
    error, _ = problem(refusing(sent))
    assert error.retry_after_s == used_s
    assert len(str(error)) < 1000


def test_requests_and_reports_name_the_same_session_in_a_header() -> None:
    """For load balancers: a report has to reach the gateway that knows the answer."""
    ready = b'{"slots": [], "id": "a", "sentences": []}'

    async def write(url: str) -> None:
        client = Gateway({**OPTIONS, "base_url": url}, url)
        await client.complete({"context": "The sea"})
        await client.report_acceptance("a", 0, 1)

    with serving_tcp(sends(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ready), ready))) as server:
        for _ in range(2):
            asyncio.run(write(f"http://{server.address}"))
    sessions = [re.findall(rb"\r\nx-session-id: (\w+)\r\n", request.lower()) for request in server.requests]
    assert sessions[:3] == 3 * sessions[:1]
    assert sessions[3:] == 3 * sessions[3:4]
    assert sessions[0] != sessions[3]
    assert len(sessions[0]) == 1
