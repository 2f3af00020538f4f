"""411 without a length, 413 above the limit, both before the body is read."""

from __future__ import annotations

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


def post_unread(gateway: Gateway, headers: dict[str, str]) -> testing.StartResponseMock:
    environ = testing.create_environ("/echo", method="POST", headers={"Host": "localhost", **headers})
    environ["wsgi.input"] = Unread()
    start_response = testing.StartResponseMock()
    b"".join(gateway.app(environ, start_response))
    return start_response


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


@pytest.mark.parametrize("headers", [{}, {"Transfer-Encoding": "chunked"}])
def test_a_body_without_a_length_is_refused(limited: Gateway, headers: dict[str, str]) -> None:
    response = limited.client.simulate_post("/echo", headers=headers)
    assert response.status_code == 411
    assert response.json["code"] == "length_required"
    assert "Content-Length" in response.json["detail"]


def test_a_chunked_body_is_refused_even_with_a_length(limited: Gateway) -> None:
    response = limited.client.simulate_post("/echo", body=b"{}", headers={"Transfer-Encoding": "chunked"})
    assert response.status_code == 411


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Length": str(LIMIT + 1)}, 413),
        ({"Transfer-Encoding": "chunked"}, 411),
        ({}, 411),
        ({"Content-Length": "-1"}, 400),
        ({"Content-Length": "many"}, 400),
    ],
)
def test_refusals_do_not_read_the_body(limited: Gateway, headers: dict[str, str], status: int) -> None:
    response = post_unread(limited, headers)
    assert response.status is not None
    assert int(response.status[:3]) == status
    assert response.headers_dict["content-type"] == "application/problem+json"


def test_only_posts_have_limits(limited: Gateway) -> None:
    response = limited.client.simulate_get("/echo", body=b"x" * (LIMIT + 1))
    assert response.status_code == 200
