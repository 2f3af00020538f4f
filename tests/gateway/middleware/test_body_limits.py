"""413 above the limit before the body is read, and bodies compressed with gzip."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from io import BytesIO

import pytest
from falcon import testing
from falcon.testing import Result

from gateway.entrance import MIN_BUCKET_BYTES
from gateway.middleware.body_limits import MEMBER_BYTES
from tests.gateway.conftest import Gateway

LIMIT = 2048
PACKED = gzip.compress(b"hello", mtime=0)


@pytest.fixture
def limited(make_echo: Callable[..., Gateway]) -> Gateway:
    return make_echo(max_body_bytes=str(LIMIT))


class Unread(BytesIO):
    """A body that may not be read."""

    def read(self, *_args: object) -> bytes:
        raise AssertionError("The body was read.")


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("length", "coding", "status", "code"),
    [
        (str(LIMIT + 1), None, 413, "body_too_large"),
        ("9" * 19, None, 413, "body_too_large"),
        ("5", "br", 415, "unsupported_coding"),
        (str(LIMIT + 1), "gzip", 413, "body_too_large"),
        (None, "br", 404, "not_found"),  # without a length, there is no body
    ],
)
def test_refusals_do_not_read_the_body(
    limited: Gateway, method: str, length: str | None, coding: str | None, status: int, code: str
) -> None:
    environ = testing.create_environ("/nothing", method=method, headers={"Host": "localhost"})
    environ["wsgi.input"] = Unread()
    environ |= {"CONTENT_LENGTH": length} if length else {}
    environ |= {"HTTP_CONTENT_ENCODING": coding} if coding else {}
    start_response = testing.StartResponseMock()
    body = b"".join(limited.app(environ, start_response))
    assert start_response.status is not None
    assert (int(start_response.status[:3]), json.loads(body)["code"]) == (status, code)


def post(gateway: Gateway, body: bytes, coding: str) -> Result:
    return gateway.client.simulate_post("/echo", body=body, headers={"Content-Encoding": coding})


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", " gzip ", "identity"])
def test_bodies_up_to_the_limit_are_taken_as_they_are_and_compressed_with_gzip(limited: Gateway, coding: str) -> None:
    pack = (lambda data: data) if coding == "identity" else gzip.compress
    for length in (0, 1, LIMIT):
        response = post(limited, pack(b"x" * length), coding)
        assert (response.status_code, response.json) == (200, {"length": length})
    response = post(limited, pack(b"x" * (LIMIT + 1)), coding)
    assert (response.status_code, response.json["code"]) == (413, "body_too_large")
    assert f"has more than the {LIMIT} bytes of the limit (TERCET_MAX_BODY_BYTES)" in response.json["detail"]


def test_members_of_any_size_are_one_body(make_echo: Callable[..., Gateway]) -> None:
    """Pieces that are unpacked end anywhere in a member."""
    parts = [bytes(range(256)) * number for number in range(40)]
    body = b"".join(gzip.compress(part, number % 10) for number, part in enumerate(parts))
    assert post(make_echo(), body, "gzip").json == {"length": sum(map(len, parts))}


def test_a_zip_bomb_is_stopped_while_it_is_unpacked(make_echo: Callable[..., Gateway]) -> None:
    bomb = gzip.compress(b"\0" * (200 << 20), 9)  # 200 kB
    echo = make_echo()
    tracemalloc.start()
    try:
        assert post(echo, bomb, "gzip").status_code == 413
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_a_body_counts_what_arrives_what_unpacks_and_each_member(make_echo: Callable[..., Gateway]) -> None:
    gateway = make_echo(max_body_bytes=str(LIMIT), bytes_per_s="1")
    cost = LIMIT + 1000 + 2 * MEMBER_BYTES  # of its head, the least that a request costs
    body = gzip.compress(b"x" * 500) * 2
    statuses = [post(gateway, body, "gzip").status_code for _ in range(MIN_BUCKET_BYTES // cost + 2)]
    assert statuses == [200] * (MIN_BUCKET_BYTES // cost) + [429] * 2


def test_a_body_of_tiny_members_is_refused_after_a_thousand(
    make_echo: Callable[..., Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,000 took the interpreter for a second, and were one request."""
    begun: list[object] = []

    class Counting:
        error, MAX_WBITS = zlib.error, zlib.MAX_WBITS

        def decompressobj(self, wbits: int) -> object:
            begun.append(wbits)
            return zlib.decompressobj(wbits=wbits)

    monkeypatch.setattr("gateway.middleware.body_limits.zlib", Counting())
    response = post(make_echo(bytes_per_s="1"), gzip.compress(b"") * 50_000, "gzip")
    assert (response.status_code, response.json["code"]) == (429, "quota_exceeded")
    assert len(begun) < (4 << 20) / MEMBER_BYTES


@pytest.mark.parametrize("body", [b"{}", PACKED[:-1], PACKED + b"b", zlib.compress(b"a")])
def test_what_is_not_complete_gzip_data_is_refused(limited: Gateway, body: bytes) -> None:
    response = post(limited, body, "gzip")
    assert (response.status_code, response.json["code"]) == (400, "malformed_request")
    assert "Content-Encoding" in response.json["detail"]


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip", "*"])
def test_other_codings_are_refused_by_the_name_of_the_header(limited: Gateway, coding: str) -> None:
    response = post(limited, b"hello", coding)
    assert (response.status_code, response.json["code"]) == (415, "unsupported_coding")
    assert response.headers["Accept-Encoding"] == "gzip"
    assert f"Content-Encoding {coding!r} is not supported" in response.json["detail"]
