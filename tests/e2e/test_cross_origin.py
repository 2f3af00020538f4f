"""Errors that the server sends before the app sees the request: a page of a listed origin can read them."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import LISTED_ORIGIN
from tests.e2e.harness import exchange_bytes
from tests.e2e.shared_servers import SharedServer

pytestmark = pytest.mark.quick
START = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
ORIGIN = b"Origin: %s\r\n" % LISTED_ORIGIN.encode()


def exchange(tercet: SharedServer, request: bytes) -> tuple[dict[str, str], bytes]:
    """Headers, their names in lower case, and body of the only response."""
    head, _, body = exchange_bytes(tercet.port, request).partition(b"\r\n\r\n")
    fields = (line.partition(": ") for line in head.decode("latin-1").split("\r\n")[1:])
    return {name.lower(): value for name, _, value in fields}, body


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (START + b"origin:%s \r\n" % LISTED_ORIGIN.encode() + b"Bad field\r\n\r\n", "malformed_request"),
        (b"GET /" + b"x" * 4100 + b" HTTP/1.1\r\nHost: localhost\r\n" + ORIGIN + b"\r\n", "url_too_long"),
        (START + ORIGIN + b"X: " + b"x" * 70_000, "headers_too_large"),  # refused while the head arrives
    ],
)
def test_a_page_of_a_listed_origin_reads_errors_of_requests_that_were_not_parsed(
    tercet: SharedServer, request_bytes: bytes, code: str
) -> None:
    headers, body = exchange(tercet, request_bytes)
    assert json.loads(body)["code"] == code
    assert headers["access-control-allow-origin"] == LISTED_ORIGIN
    assert headers["vary"] == "Origin"
    assert "X-Request-Id" in headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "fields",
    [
        b"Origin: https://evil.example\r\n",
        ORIGIN + b"Origin: https://evil.example\r\n",
        b"Referer: %s/page\r\n" % LISTED_ORIGIN.encode(),
    ],
)
def test_other_pages_read_none_of_them(tercet: SharedServer, fields: bytes) -> None:
    headers, body = exchange(tercet, START + fields + b"Bad field\r\n\r\n" + ORIGIN)
    assert json.loads(body)["code"] == "malformed_request"
    assert "access-control-allow-origin" not in headers
