"""Environments as gunicorn makes them, and responses that a client can delimit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn.config import Config
from gunicorn.http import get_parser
from gunicorn.http.wsgi import create

from gateway.server.request_parser import Request, RequestParser
from gateway.server.wsgi import ResponseWriter, make_environ

CLIENT, SERVER = ("127.0.0.1", 50123), ("127.0.0.1", 8000)
CONFIG = Config()
for setting, value in {"forwarded_allow_ips": "", "forwarder_headers": "", "secure_scheme_headers": {}}.items():
    CONFIG.set(setting, value)
# What is not compared: objects, what differs with the worker class, and what no app here reads.
LEFT_OUT = {f"wsgi.{name}" for name in ("errors", "input", "early_hints", "file_wrapper", "multithread")}
LEFT_OUT.add("SERVER_SOFTWARE")


def parse(data: bytes) -> Request:
    parser = RequestParser(1000)
    assert parser.advance(data)
    return parser.take()


@pytest.mark.parametrize(
    "data",
    [
        b"POST /autocomplete HTTP/1.1\r\nHost: localhost:8000\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n\xc3\xa9",
        b"GET /v1%2fmodels/%C3%A4%zz?a=%20&b=c,d HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET //a//b?? HTTP/1.0\r\nHost: h\r\nX-Forwarded-For: 1\r\nX_Forwarded_For: 2\r\n\r\n",
        b"HEAD / HTTP/1.1\r\nHost: h\r\nAccept: a\r\naccept: b\r\nSCRIPT-NAME: /x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-Continue\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: h\r\nLatin: \xe9 \t\r\nEmpty:\r\n\r\n",
    ],
)
def test_an_environment_is_as_gunicorn_makes_it(data: bytes) -> None:
    environ = make_environ(parse(data), "http", None, CLIENT, SERVER)
    source = BytesIO(data)
    request = next(get_parser(CONFIG, SimpleNamespace(recv=source.read), CLIENT))
    _, expected = create(request, SimpleNamespace(send=len), CLIENT, SERVER, CONFIG)
    assert environ["wsgi.input"].read() == expected["wsgi.input"].read()
    expected["gunicorn.socket"] = None
    assert {key: environ[key] for key in environ.keys() - LEFT_OUT} == {
        key: expected[key] for key in expected.keys() - LEFT_OUT
    }


# Responses.


def respond(
    body: Iterable[bytes], status: str, headers: list[tuple[str, str]], method: str, version: str
) -> tuple[list[bytes], ResponseWriter]:
    """What is sent, one item per write."""
    sent: list[bytes] = []
    request = parse(f"{method} / HTTP/{version}\r\nHost: h\r\nConnection: keep-alive\r\n\r\n".encode())

    def app(start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response(status, headers)
        return body

    writer = ResponseWriter(sent.append, request.head, keeps_connection=True)
    writer.respond(app)
    return sent, writer


LENGTH = [("Content-Length", "5")]


@pytest.mark.parametrize(
    ("status", "headers", "method", "version", "field", "body", "is_kept"),
    [
        ("200 OK", LENGTH, "GET", "1.1", "content-length: 5", b"hello", True),
        ("200 OK", LENGTH, "GET", "1.0", "content-length: 5", b"hello", True),
        ("200 OK", [("content-length", "4")], "GET", "1.1", "content-length: 4", b"hell", True),
        ("200 OK", [("content-length", "6")], "GET", "1.1", "content-length: 6", b"hello", False),
        ("200 OK", [], "GET", "1.1", "transfer-encoding: chunked", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", True),
        ("200 OK", [], "GET", "1.0", "", b"hello", False),
        ("200 OK", LENGTH, "HEAD", "1.1", "content-length: 5", b"", True),
        ("200 OK", [], "HEAD", "1.1", "", b"", True),
        ("204 No Content", LENGTH, "POST", "1.1", "", b"", True),
        ("304 Not Modified", LENGTH, "GET", "1.1", "content-length: 5", b"", True),
        ("304 Not Modified", [], "GET", "1.0", "", b"", True),
    ],
)
def test_a_client_knows_where_a_response_ends(
    status: str, headers: list[tuple[str, str]], method: str, version: str, field: str, body: bytes, is_kept: bool
) -> None:
    sent, writer = respond([b"", b"he", b"", b"llo"], status, headers, method, version)
    head, _, found = b"".join(sent).decode().lower().partition("\r\n\r\n")
    framing = "\r\n".join(line for line in head.split("\r\n") if line.startswith(("content-length", "transfer-")))
    assert (framing, found.encode(), writer.keeps_connection) == (field, body, is_kept)
    assert head.startswith(f"http/1.1 {status.lower()}\r\n")
    assert re.search(r"\r\ndate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d gmt\r\n", head)
    assert f"\r\nconnection: {'keep-alive' if is_kept or '6' in field else 'close'}\r\n" in head + "\r\n"


def test_a_head_leaves_with_the_first_bytes_of_the_body_and_each_later_part_at_once() -> None:
    sent, _ = respond(
        iter([b"", b"data: 1", b"data: 2"]), "200 OK", [("content-type", "text/event-stream")], "GET", "1.1"
    )
    assert [part[-12:] for part in sent] == [b"7\r\ndata: 1\r\n", b"7\r\ndata: 2\r\n", b"0\r\n\r\n"]


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: b", "a\nb", "a\rb", "€"])
def test_a_header_that_is_no_single_line_of_latin_1_is_refused_unsent(value: str) -> None:
    for header in (("x", value), (value, "x")):
        with pytest.raises(ValueError, match=r"line break|latin-1"):
            respond([b"{}"], "200 OK", [("content-length", "2"), header], "GET", "1.1")


@pytest.mark.parametrize("num_parts", [0, 1])
def test_a_body_that_fails_is_closed_and_its_error_raised(num_parts: int) -> None:
    class Body:
        is_closed = False

        def __iter__(self) -> Iterable[bytes]:
            yield from [b"part"] * num_parts
            raise ZeroDivisionError

        def close(self) -> None:
            self.is_closed = True

    body = Body()
    sent: list[bytes] = []
    writer = ResponseWriter(sent.append, parse(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").head, keeps_connection=True)

    def app(start_response: Callable[..., Any]) -> Any:
        start_response("200 OK", [])
        return body

    with pytest.raises(ZeroDivisionError):
        writer.respond(app)
    assert body.is_closed
    assert writer.has_begun is bool(num_parts)
    assert not b"".join(sent).endswith(b"0\r\n\r\n")
