"""411 without a length, 413 above the limit, both before the body is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO

import pytest
from falcon import testing

from tests.gateway.conftest import Gateway

LIMIT = 2048


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
    names = {"Content-Length": "CONTENT_LENGTH", "Transfer-Encoding": "HTTP_TRANSFER_ENCODING"}
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
    for part in (str(LIMIT + 1), str(LIMIT), "TERCET_MAX_BODY_BYTES"):
        assert part in response.json["detail"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Content-Length": str(LIMIT + 1)}, 413, "body_too_large"),
        ({"Content-Length": "9" * 19}, 413, "body_too_large"),
        ({"Content-Length": "9" * 20}, 400, "malformed_request"),
        ({"Content-Length": "-1"}, 400, "malformed_request"),
        ({"Content-Length": "+5"}, 400, "malformed_request"),
        ({"Content-Length": "5,5"}, 400, "malformed_request"),
        ({"Content-Length": "5 5"}, 400, "malformed_request"),
        ({"Content-Length": "1_0"}, 400, "malformed_request"),
        ({"Content-Length": "0x10"}, 400, "malformed_request"),
        ({"Content-Length": "5\u00b2"}, 400, "malformed_request"),
        ({"Content-Length": "\u0665"}, 400, "malformed_request"),
        ({"Content-Length": "many"}, 400, "malformed_request"),
        ({"Transfer-Encoding": "chunked"}, 411, "length_required"),
        ({"Transfer-Encoding": "identity", "Content-Length": "5"}, 411, "length_required"),
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


def test_a_post_without_a_length_is_refused_unread(limited: Gateway) -> None:
    _, body = send_unread(limited, "POST", {})
    assert json.loads(body)["code"] == "length_required"
    assert "Content-Length" in json.loads(body)["detail"]


def test_other_methods_need_no_length(limited: Gateway) -> None:
    for length in (None, "0", str(LIMIT)):
        headers = {} if length is None else {"Content-Length": length}
        response, _ = send_unread(limited, "GET", headers)
        assert response.status == "200 OK"
