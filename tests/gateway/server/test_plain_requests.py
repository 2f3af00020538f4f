"""Plain requests: what is one, and that gunicorn would make the same environment and the same response of it."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from gunicorn.config import Config
from gunicorn.http import get_parser
from gunicorn.http.errors import ParseException
from gunicorn.http.wsgi import Response, base_environ, create
from hypothesis import given
from hypothesis import strategies as st

from gateway.server.connections import RequestSource, ResponseSocket
from gateway.server.plain_requests import MAX_FIELDS, plain_environ, plain_head

CLIENT, SERVER = ("127.0.0.1", 50123), ("127.0.0.1", 8000)
CONFIG = Config()
for setting, value in {"forwarded_allow_ips": "", "forwarder_headers": "", "secure_scheme_headers": {}}.items():
    CONFIG.set(setting, value)  # as in gunicorn.conf.py
BASE = {
    **base_environ(CONFIG),
    "wsgi.url_scheme": "http",
    "SERVER_PROTOCOL": "HTTP/1.1",
    "SCRIPT_NAME": "",
}
# Objects of one request, and a callback that no route uses.
OBJECTS = ("wsgi.errors", "wsgi.input", "gunicorn.socket", "wsgi.early_hints")


def post(*fields: bytes, target: bytes = b"/autocomplete", body: bytes = b"{}", version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"POST %s HTTP/%s" % (target, version), *fields, b"Content-Length: %d" % len(body), b"", body])


def ours(data: bytes) -> dict[str, Any] | None:
    return plain_environ(data, BASE, None, CLIENT, SERVER)


def gunicorns(data: bytes) -> dict[str, Any]:
    """
    Raises:
        ParseException: gunicorn refuses the request.
    """
    request = next(get_parser(CONFIG, RequestSource(data), CLIENT))
    _, environ = create(request, None, CLIENT, SERVER, CONFIG)
    return dict(environ)


def assert_same(environ: dict[str, Any], data: bytes) -> None:
    expected = gunicorns(data)
    assert environ["wsgi.input"].read() == expected["wsgi.input"].read()
    drop = set(OBJECTS)
    assert {key: environ[key] for key in environ.keys() - drop} == {
        key: expected[key] for key in expected.keys() - drop
    }


@pytest.mark.parametrize(
    "data",
    [
        post(b"Host: localhost:8000"),
        post(b"Host: localhost", b"Content-Type: application/json", body=b'{"context": "\xc3\xa9"}'),
        post(b"Host: h", b"connection: Keep-Alive", b"X-Request-Id:   a-b.c \t", b"Empty:"),
        post(b"Host: h", b"Authorization: Bearer tk:1", target=b"/v1/completions?a=1&b=c,d"),
        post(b"Host: h", target=b"/"),
        post(b"Host: h", b"Prefer: respond-async, wait=10", b"Content-Language: de", body=b""),
    ],
)
def test_a_plain_request_has_gunicorns_environment(data: bytes) -> None:
    environ = ours(data)
    assert environ is not None
    assert_same(environ, data)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
        post(b"Host: h", version=b"1.0"),
        post(b"Host: h", target=b"//evil/path"),
        post(b"Host: h", target=b"http://h/autocomplete"),
        post(b"Host: h", target=b"/auto%63omplete"),
        post(b"Host: h", target=b"/a?q=%20"),
        post(b"Host: h", target=b"/a#b"),
        post(b"Host: h", target="/ä".encode()),
        post(b"Host: h", b"Host: i"),
        post(b"Host: h", b"Cookie: a", b"cookie: b"),
        post(b"Host: h", b"Content-Length: 2"),
        post(b"Host: h", b"Transfer-Encoding: identity"),
        post(b"Host: h", b"Expect: 100-continue"),
        post(b"Host: h", b"Connection: close"),
        post(b"Host: h", b"Connection: keep-alive, upgrade"),
        post(b"Host: h", b"Upgrade: h2c"),
        post(b"Host: h", b"X_Forwarded_For: 1"),
        post(b"Host: h", b"Space : 1"),
        post(b"Host: h", b" Folded: 1"),
        post(b"Host: h", b"No colon"),
        post(b"Host: h", b": no name"),
        post(b"Host: h", b"Nul: a\0b"),
        post(b"Host: h", b"Bare: a\nb"),
        post(b"Host: h", b"Return: a\rb"),
        post(b"Host: h", "Latin: é".encode("latin-1")),
        post(b"Host: h", b"Long: " + b"a" * 4000),
        post(*[b"F%d: 1" % number for number in range(MAX_FIELDS)]),
        b"\r\n" + post(b"Host: h"),
    ],
)
def test_what_could_be_read_in_two_ways_is_not_plain(data: bytes) -> None:
    assert ours(data) is None


FIELD = st.one_of(
    st.builds(
        lambda name, value: name + value,
        st.sampled_from(
            [b"Host:", b"X-A:", b"x-a: ", b"Connection: ", b"Content-Type:\t", b"TE: ", b"Via :", b"A_B: "]
        ),
        st.from_regex(rb"[ -~]{0,8}", fullmatch=True)
        | st.binary(max_size=4)
        | st.sampled_from([b"close", b"keep-alive", b"1", b"a\r\n b", b"\x7f", b"trailers"]),
    ),
    st.binary(max_size=12),
)


@given(
    fields=st.lists(FIELD, max_size=4),
    target=st.sampled_from([b"/autocomplete", b"/a?b=c", b"/a//b", b"/."]) | st.binary(max_size=6).map(b"/".__add__),
)
def test_a_request_that_is_plain_is_valid_and_has_gunicorns_environment(fields: list[bytes], target: bytes) -> None:
    data = post(*fields, target=target)
    if data.count(b"\r\n\r\n") > 1 or (environ := ours(data)) is None:  # two requests, or not plain
        return
    try:
        assert_same(environ, data)
    except ParseException as error:
        raise AssertionError("gunicorn refuses it") from error


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        ("200 OK", [("content-type", "application/json"), ("x-request-id", "a"), ("content-length", "2")]),
        ("422 Unprocessable Entity", [("content-length", "2"), ("vary", "Origin")]),
    ],
)
def test_a_plain_response_is_as_gunicorn_writes_it(status: str, headers: list[tuple[str, str]]) -> None:
    head = plain_head(status, headers)
    assert head is not None
    with (pair := socket.socketpair())[0], pair[1]:
        request = SimpleNamespace(method="POST", version=(1, 1), should_close=lambda: False)
        response = Response(request, ResponseSocket(pair[0]), CONFIG)
        response.start_response(status, headers)
        response.write(b"{}")
        response.close()
        received = pair[1].recv(1000)

    def without_date(data: bytes) -> bytes:
        data, count = re.subn(rb"\r\nDate: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n", b"\r\n", data)
        assert count == 1
        return data

    assert without_date(head + b"{}") == without_date(received)


@pytest.mark.parametrize(
    ("status", "headers"),
    [("200 OK", [("content-type", "text/event-stream")]), ("204 No Content", [("content-length", "0")])],
)
def test_a_response_without_length_or_content_is_not_plain(status: str, headers: list[tuple[str, str]]) -> None:
    assert plain_head(status, headers) is None


@pytest.mark.parametrize("value", ["a\r\nSet-Cookie: b", "a\nb", "a\rb", "€"])
def test_a_header_that_is_no_single_line_of_latin_1_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"line break|latin-1"):
        plain_head("200 OK", [("content-length", "2"), ("x", value)])
