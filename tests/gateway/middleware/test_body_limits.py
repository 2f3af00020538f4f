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


def send_unread(gateway: Gateway, method: str, headers: dict[str, str]) -> tuple[testing.StartResponseMock, bytes]:
    environ = testing.create_environ("/echo", method=method, headers={"Host": "localhost"})
    environ["wsgi.input"] = Unread()
    names = {"Content-Length": "CONTENT_LENGTH", "Content-Encoding": "HTTP_CONTENT_ENCODING"}
    environ |= {names[name]: value for name, value in headers.items()}
    start_response = testing.StartResponseMock()
    return start_response, b"".join(gateway.app(environ, start_response))


def test_bodies_up_to_the_limit_are_taken(limited: Gateway) -> None:
    for length in (0, 1, LIMIT):
        response = limited.client.simulate_post("/echo", body=b"x" * length, headers={"Content-Length": str(length)})
        assert (response.status_code, response.json) == (200, {"length": length})


def test_a_larger_body_is_refused(limited: Gateway) -> None:
    response = limited.client.simulate_post("/echo", body=b"x" * (LIMIT + 1))
    assert response.status_code == 413
    assert response.json["code"] == "body_too_large"
    for part in (str(LIMIT), "TERCET_MAX_BODY_BYTES"):
        assert part in response.json["detail"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Length": str(LIMIT + 1)}, 413, "body_too_large"),
        ({"Content-Length": "9" * 19}, 413, "body_too_large"),
        ({"Content-Length": "5", "Content-Encoding": "br"}, 415, "unsupported_coding"),
        ({"Content-Length": str(LIMIT + 1), "Content-Encoding": "gzip"}, 413, "body_too_large"),
    ],
)
def test_refusals_do_not_read_the_body(
    limited: Gateway, method: str, headers: dict[str, str], status: int, code: str
) -> None:
    response, body = send_unread(limited, method, headers)
    assert response.status is not None
    assert int(response.status[:3]) == status
    assert response.headers_dict["content-type"] == "application/problem+json"
    assert json.loads(body)["code"] == code


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_a_request_without_a_length_has_no_body(limited: Gateway, method: str) -> None:
    for length in (None, "0", str(LIMIT)):
        headers = {} if length is None else {"Content-Length": length}
        response, _ = send_unread(limited, "GET", headers)
        assert response.status == "200 OK"
    for coding in ("gzip", "br"):
        response, _ = send_unread(limited, method, {"Content-Encoding": coding})
        assert "415" not in str(response.status)


def post(gateway: Gateway, body: bytes, coding: str) -> Result:
    return gateway.client.simulate_post("/echo", body=body, headers={"Content-Encoding": coding})


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", " gzip "])
def test_a_body_compressed_with_gzip_is_decompressed(limited: Gateway, coding: str) -> None:
    for length in (0, 1, LIMIT):
        response = post(limited, gzip.compress(b"x" * length), coding)
        assert (response.status_code, response.json) == (200, {"length": length})
    assert post(limited, gzip.compress(b"one") + gzip.compress(b"two"), coding).json == {"length": 6}


def test_identity_is_no_coding(limited: Gateway) -> None:
    assert post(limited, b"hello", "identity").json == {"length": 5}


def test_a_body_that_is_too_large_decompressed_is_refused_before_it_is_decompressed(limited: Gateway) -> None:
    response = post(limited, gzip.compress(b"x" * (LIMIT + 1)), "gzip")
    assert (response.status_code, response.json["code"]) == (413, "body_too_large")
    assert response.json["detail"].startswith(f"Decompressed, the body has more than the {LIMIT} bytes")


def test_a_zip_bomb_is_stopped_while_it_is_decompressed(make_echo: Callable[..., Gateway]) -> None:
    bomb = gzip.compress(b"\0" * (200 << 20), 9)  # 200 kB
    echo = make_echo()
    tracemalloc.start()
    try:
        assert post(echo, bomb, "gzip").status_code == 413
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("body", [b"{}", PACKED[:-1], PACKED + b"b", zlib.compress(b"a")])
def test_what_is_not_complete_gzip_data_is_refused(limited: Gateway, body: bytes) -> None:
    response = post(limited, body, "gzip")
    assert (response.status_code, response.json["code"]) == (400, "malformed_request")
    assert "Content-Encoding" in response.json["detail"]


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "compress", "gzip, gzip", "aws-chunked", "*", "utf-8"])
def test_other_codings_are_refused_by_the_name_of_the_header(limited: Gateway, coding: str) -> None:
    response = post(limited, b"hello", coding)
    assert (response.status_code, response.json["code"]) == (415, "unsupported_coding")
    assert response.headers["Accept-Encoding"] == "gzip"
    assert f"Content-Encoding {coding!r} is not supported" in response.json["detail"]
