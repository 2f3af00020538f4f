"""Error responses: our errors, Falcon's and unexpected exceptions, all as problem+json."""

from __future__ import annotations

import json
from typing import Any

import falcon
import pytest
import structlog
from falcon import testing

from shared.errors import FieldError, InvalidRequest, Overloaded
from tests.bad_requests import HttpRequest, call_app
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
        "title": InvalidRequest.title,
        "status": 422,
        "code": "invalid_request",
        "detail": "length is wrong.",
        "errors": [{"field": "length", "message": "must be at least 1"}],
        "request_id": "r-1",
    }


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
    assert (event["log_level"], event["request_id"], event["route"]) == ("error", "r-1", "/failing")


def test_an_expected_error_has_retry_after_as_a_header_and_is_not_logged_as_an_exception(gateway: Gateway) -> None:
    with structlog.testing.capture_logs() as events:
        response = get(gateway, Overloaded("Too many.", retry_after_s=3))
    assert response.status_code == 503
    assert response.headers["Retry-After"] in {"3", "4", "5"}
    assert [event["event"] for event in events] == ["request_finished"]


def test_a_method_that_is_not_served_is_answered_with_those_that_are(gateway: Gateway) -> None:
    """And with a curl line where POST is one."""
    for method, path in (("GET", "/autocomplete"), ("DELETE", "/autocomplete"), ("PUT", "/feedback")):
        response = gateway.client.simulate_request(method, path)
        assert (response.status_code, response.json["code"]) == (405, "method_not_allowed")
        assert set(response.headers["Allow"].split(", ")) == {"POST", "OPTIONS"}
        detail = response.json["detail"]
        assert detail.startswith(f'{path} takes POST, OPTIONS, not {method}. Try: curl -d \'{{"context": ')
        assert detail.endswith("http://localhost:8000/autocomplete")
    for method in ("POST", "PROPFIND"):  # of WebDAV
        status, headers, body = call_app(gateway.app, HttpRequest(method, "/metrics"))
        assert (status, headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        assert json.loads(body)["detail"] == f"/metrics takes GET, HEAD, OPTIONS, not {method}."


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (falcon.HTTPBadRequest(title="Bad header"), "The request was not understood."),
        (falcon.HTTPInvalidHeader("It is not a number.", "Range"), 'The value provided for the "Range"'),
    ],
)
def test_falcons_other_errors_are_problem_json_too(gateway: Gateway, error: Exception, detail: str) -> None:
    response = get(gateway, error)
    assert response.status_code == 400
    assert response.headers["Content-Type"] == "application/problem+json"
    problem: dict[str, Any] = response.json
    assert (problem["status"], problem["code"], problem["request_id"]) == (400, "malformed_request", "r-1")
    assert problem["detail"].startswith(detail)


def test_an_http_error_of_falcons_that_is_the_servers_fault_is_unexpected(gateway: Gateway) -> None:
    with structlog.testing.capture_logs() as events:
        response = get(gateway, falcon.HTTPInternalServerError(title=SECRET))
    assert (response.status_code, response.json["code"]) == (500, "internal_error")
    assert SECRET not in response.text
    assert "unhandled_exception" in [event["event"] for event in events]


@pytest.mark.parametrize("method", ["WEBSOCKET", "PRI", "get", "x" * 65_536, "tct-key", "G\u00cbT"])
@pytest.mark.parametrize("path", ["/autocomplete", "/health/live", "/nothing"])
def test_a_method_that_is_not_https_is_refused_and_not_logged(gateway: Gateway, method: str, path: str) -> None:
    """Falcon refuses WEBSOCKET before any middleware has run."""
    with structlog.testing.capture_logs() as events:
        _, headers, body = call_app(gateway.app, HttpRequest(method, path, headers={"X-Request-Id": "r-1"}))
    problem = json.loads(body)
    assert headers["content-type"] == "application/problem+json"
    assert headers["x-request-id"] == problem["request_id"] == "r-1"
    if path == "/nothing" and method != "WEBSOCKET":
        assert (problem["status"], problem["code"]) == (404, "not_found")
    else:
        assert (problem["status"], problem["code"]) == (400, "malformed_request")
        assert problem["detail"].startswith("The method must be one of CONNECT, DELETE, GET")
    [event] = events
    assert (event["event"], event["method"]) == ("request_finished", "(other)")
    assert method not in str(event)
