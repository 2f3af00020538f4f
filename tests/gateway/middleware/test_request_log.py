"""Request ids, Server-Timing, the log line and the metrics of each request, refused and streamed ones too."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import structlog
from falcon import testing

from tests.gateway.conftest import Gateway, MakeGateway
from tests.gateway.exposition import total

Events = list[MutableMapping[str, Any]]


@contextmanager
def logged() -> Iterator[Events]:
    """The log lines about requests within the block."""
    lines: Events = []
    with structlog.testing.capture_logs() as events:
        yield lines
    lines += [event for event in events if event["event"] == "request_finished"]


def post_stream(gateway: Gateway, path: str = "/stream") -> tuple[Any, testing.StartResponseMock]:
    """The body and the head of a streamed response, before anything has read the body."""
    environ = testing.create_environ(path, method="POST", headers={"Host": "localhost"}, body="{}")
    start_response = testing.StartResponseMock()
    return gateway.app(environ, start_response), start_response


@pytest.mark.parametrize("given", ["r-1", "A.b_c-9", "x" * 64, None, "", "x" * 65, "a b", 'a"b', "{}"])
def test_a_harmless_request_id_is_echoed_and_another_replaced_by_a_random_one(echo: Gateway, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    ids = {echo.client.simulate_get("/echo", headers=headers).headers["X-Request-Id"] for _ in range(3)}
    is_random = len(ids) == 3 and all(re.fullmatch(r"[0-9a-f]{16}", request_id) for request_id in ids)
    assert is_random if given not in {"r-1", "A.b_c-9", "x" * 64} else ids == {given}


def test_a_request_has_a_timing_a_log_line_and_is_counted(echo: Gateway) -> None:
    with logged() as lines:
        response = echo.client.simulate_post("/echo", body=b"{}", headers={"X-Request-Id": "r-1"})
        echo.client.simulate_get("/echo")
        echo.client.simulate_get("/static/page.js")
    match = re.fullmatch(
        r"queue;dur=1\.50, decode;dur=20\.00, total;dur=(\d+\.\d\d)", response.headers["Server-Timing"]
    )
    assert match
    assert 0 <= float(match[1]) < 5_000
    assert [line["log_level"] for line in lines] == ["info", "debug", "debug"]  # a GET is no news
    assert lines[0].pop("ms") >= 0
    assert lines[0] == {
        "event": "request_finished",
        "log_level": "info",
        "request_id": "r-1",
        "method": "POST",
        "route": "/echo",
        "status": 200,
        "model": "small",
    }
    assert total(echo.metrics, "tercet_requests_total", route="/echo", status="200") == 2
    assert total(echo.metrics, "tercet_request_seconds_count", route="/echo") == 2
    assert total(echo.metrics, "tercet_requests_total", route="/static/{name}", status="200") == 1


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "route"),
    [
        ("POST", "/echo", {"Content-Length": "2", "Content-Encoding": "br"}, 415, "(none)"),
        ("POST", "/echo", {"Content-Length": "9999999"}, 413, "(none)"),
        ("GET", "/nothing", {}, 404, "(none)"),
        ("DELETE", "/echo", {}, 405, "/echo"),
    ],
)
def test_refused_requests_have_an_id_a_timing_a_log_line_and_are_counted(
    make_echo: MakeGateway, method: str, path: str, headers: dict[str, str], status: int, route: str
) -> None:
    """And a listed page may read why."""
    echo, origin = make_echo(origins="https://notes.example"), "https://notes.example"
    with logged() as lines:
        sent = {"X-Request-Id": "r-1", "Origin": origin, **headers}
        response = echo.client.simulate_request(method, path, headers=sent)
    assert response.status_code == status
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["X-Request-Id"] == response.json["request_id"] == "r-1"
    assert response.headers["Server-Timing"].startswith("total;dur=")
    assert response.headers.get("Access-Control-Allow-Origin") == origin
    assert [(line["request_id"], line["status"], line["route"]) for line in lines] == [("r-1", status, route)]
    assert total(echo.metrics, "tercet_requests_total", route=route, status=str(status)) == 1


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_a_streamed_request_ends_when_its_body_is_closed(echo: Gateway, num_read: int) -> None:
    with logged() as lines:
        body, head = post_stream(echo)
        assert "server-timing" not in head.headers_dict
        assert "x-request-id" in head.headers_dict
        assert list(islice(body, num_read)) == [b"one", b"two"][:num_read]
        assert total(echo.metrics, "tercet_requests_total", route="/stream") == 0
        body.close()
    assert [(line["route"], line["status"], line["model"]) for line in lines] == [("/stream", 200, "small")]
    assert total(echo.metrics, "tercet_requests_total", route="/stream", status="200") == 1
    assert total(echo.metrics, "tercet_request_seconds_count", route="/stream") == 1


def test_a_stream_that_fails_to_close_is_logged_all_the_same(echo: Gateway) -> None:
    class Broken:
        def on_post(self, _req: Any, resp: Any) -> None:
            resp.stream = self

        def __iter__(self) -> Iterator[bytes]:
            return iter([b"one"])

        def close(self) -> None:
            raise OSError("a bug")

    echo.app.add_route("/broken", Broken())
    body, _ = post_stream(echo, "/broken")
    with logged() as lines, pytest.raises(OSError, match="a bug"):
        body.close()
    assert [line["route"] for line in lines] == ["/broken"]
