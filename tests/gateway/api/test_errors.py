"""Error responses: our errors, Falcon's and unexpected exceptions, all as problem+json."""

from __future__ import annotations

from typing import Any

import falcon
import pytest
import structlog
from falcon import testing

from shared.errors import FieldError, InvalidRequest, Overloaded
from tests.gateway.conftest import Gateway

SECRET = "the old man looked at the sea"


class Failing:
    """Raises what a test gives it, after it has begun a response."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.text = f"half a response about {SECRET}"
        raise self._error


def get(gateway: Gateway, error: Exception) -> testing.Result:
    gateway.app.add_route("/failing", Failing(error))
    return gateway.client.simulate_get("/failing", headers={"X-Request-Id": "r-1"})


def test_our_errors_carry_their_status_code_fields_and_headers(gateway: Gateway) -> None:
    error = InvalidRequest("length is wrong.", fields=(FieldError("length", "must be at least 1"),))
    response = get(gateway, error)
    assert response.status_code == 422
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json == {
        "type": "urn:tercet:error:invalid_request",
        "title": "Invalid field in the request",
        "status": 422,
        "code": "invalid_request",
        "detail": "length is wrong.",
        "errors": [{"field": "length", "message": "must be at least 1"}],
        "request_id": "r-1",
    }


def test_retry_after_is_a_header(gateway: Gateway) -> None:
    response = get(gateway, Overloaded("Too many.", retry_after_s=3))
    assert (response.status_code, response.headers["Retry-After"]) == (503, "3")


def test_an_unexpected_exception_is_logged_and_answered_generically(gateway: Gateway) -> None:
    error = ZeroDivisionError(SECRET)
    with structlog.testing.capture_logs() as events:
        response = get(gateway, error)
    assert response.status_code == 500
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json["code"] == "internal_error"
    assert "r-1" in response.json["detail"]
    assert SECRET not in response.text
    [event] = [event for event in events if event["event"] == "unhandled_exception"]
    assert event["exc_info"] is error
    assert (event["log_level"], event["request_id"], event["path"]) == ("error", "r-1", "/failing")


def test_expected_errors_are_not_logged_as_exceptions(gateway: Gateway) -> None:
    with structlog.testing.capture_logs() as events:
        get(gateway, Overloaded("Too many."))
    assert [event["event"] for event in events] == ["request_finished"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/autocomplete", {"POST", "OPTIONS"}),
        ("DELETE", "/autocomplete", {"POST", "OPTIONS"}),
        ("PUT", "/feedback", {"POST", "OPTIONS"}),
    ],
)
def test_a_method_that_needs_post_shows_a_curl_line(
    gateway: Gateway, method: str, path: str, allowed: set[str]
) -> None:
    response = gateway.client.simulate_request(method, path)
    assert response.status_code == 405
    assert set(response.headers["Allow"].split(", ")) == allowed
    problem = response.json
    assert problem["code"] == "method_not_allowed"
    assert problem["detail"].startswith(f'{path} takes POST, OPTIONS, not {method}. Try: curl -d \'{{"context": ')
    assert problem["detail"].endswith("http://localhost:8000/autocomplete")


def test_a_method_that_needs_get_shows_no_curl_line(gateway: Gateway) -> None:
    response = gateway.client.simulate_post("/metrics", body=b"{}")
    assert response.status_code == 405
    assert response.json["detail"] == "/metrics takes GET, OPTIONS, not POST."


def test_an_unknown_path_lists_what_is_served(gateway: Gateway) -> None:
    response = gateway.client.simulate_get("/nothing")
    assert response.status_code == 404
    assert response.headers["Content-Type"] == "application/problem+json"
    detail = response.json["detail"]
    assert detail.startswith("/nothing is not served here")
    for served in ("POST /autocomplete", "GET /health/ready", "GET /metrics"):
        assert served in detail


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (falcon.HTTPUnsupportedMediaType(description="Send JSON."), 415, "Send JSON."),
        (falcon.HTTPBadRequest(title="Bad header"), 400, "Bad header"),
        (falcon.HTTPInvalidHeader("It is not a number.", "Range"), 400, 'The value provided for the "Range"'),
    ],
)
def test_falcons_other_errors_are_problem_json_too(
    gateway: Gateway, error: Exception, status: int, detail: str
) -> None:
    response = get(gateway, error)
    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/problem+json"
    problem: dict[str, Any] = response.json
    assert (problem["status"], problem["code"], problem["request_id"]) == (status, "bad_request", "r-1")
    assert problem["detail"].startswith(detail)
