"""Requests that are refused without being started: early, counted by reason, logged at debug, per owner."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import falcon
import pytest
import structlog
from falcon import testing

from shared.errors import ShuttingDown
from shared.protocol import GenerateRequest
from tests.e2e.harness import until
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.exposition import samples, total
from tests.gateway.generation.stubs import Refusal, Step, completion, hang


@dataclass(frozen=True)
class Key:
    rate: int | None = None
    concurrency: int | None = None


class Keys:
    """Stands for the middleware that finds a request's API key."""

    def __init__(self, **keys: Key) -> None:
        self._keys = keys

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        name = req.get_header("X-Key") or ""
        req.context.owner, req.context.key = name, self._keys.get(name)


def quick(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, f" the sea {request.seed}")


@contextmanager
def held(api: Api, number: int, **options: Any) -> Iterator[list[Future[testing.Result]]]:
    """Requests whose branches run, or wait, until the block ends."""
    with ThreadPoolExecutor(number) as pool:
        requests = [pool.submit(api.post, "/autocomplete", {"context": "a"}, **options) for _ in range(number)]
        admission = api.pool.admission
        until(lambda: sum(admission.in_flight()) + admission.num_waiting >= 3 * number, 5, "all branches admitted")
        yield requests
        api.pool.fanout.cancel_all(ShuttingDown("The server is being stopped."))


def num_refused(api: Api, reason: str) -> float:
    return total(api.pool.metrics, "tercet_refused_requests_total", reason=reason)


def test_a_full_queue_refuses_its_owner_before_the_body_is_read(make_api: MakeApi) -> None:
    api = make_api(hang, queue=3)
    with held(api, 2) as requests, structlog.testing.capture_logs() as logged:
        responses = [api.post("/autocomplete", "not an object: 422 if it were parsed") for _ in range(60)]
        assert {(response.status_code, response.json["code"]) for response in responses} == {(503, "overloaded")}
        assert {response.headers["Retry-After"] for response in responses} == {"1", "2", "3"}  # spreads their return
        assert num_refused(api, "overloaded") == 60
        lines = [line for line in logged if line.get("status") == 503 and line["log_level"] == "debug"]
        assert [line["event"] for line in lines] == ["request_finished"] * 60
        # Without keys, owners are addresses: another has its share of the queue, at the expense of the first.
        body = {"context": "a", "n": 1, "max_time": 0.3}
        assert api.post("/autocomplete", body, extras={"REMOTE_ADDR": "10.0.0.2"}).status_code == 504
    assert sorted(request.result().json["code"] for request in requests) == ["overloaded", "shutting_down"]


def test_a_request_that_failed_is_no_refusal(make_api: MakeApi) -> None:
    api = make_api(lambda _: [Refusal(500, "internal_error")])
    with structlog.testing.capture_logs() as logged:
        assert api.complete().status_code == 503
    assert samples(api.pool.metrics, "tercet_refused_requests_total") == {}
    assert [line["log_level"] for line in logged if line["event"] == "request_finished"] == ["info"]


@pytest.mark.parametrize(("key", "limit"), [("a", 2), ("b", 1)], ids=["default", "own"])
def test_a_key_has_its_number_of_requests_at_a_time(make_api: MakeApi, key: str, limit: int) -> None:
    api = make_api(hang, settings={"key_concurrency": "2"}, max_batch=30)
    api.app.add_middleware(Keys(a=Key(), b=Key(concurrency=1), c=Key()))
    with held(api, limit, headers={"X-Key": key}):
        response = api.complete_as(key)
        assert (response.status_code, response.json["code"]) == (429, "quota_exceeded")
        assert 1 <= int(response.headers["Retry-After"]) <= 3
        assert num_refused(api, "quota_exceeded") == 1
        assert api.complete_as("c", max_time=0.1).status_code == 504
        with held(api, 6) as of_an_address:  # which has no such limit
            pass
    assert {request.result().status_code for request in of_an_address} == {503}


@pytest.mark.parametrize("body", [{"context": "a"}, {"context": "a", "stream": True}, {"context": 1}])
def test_the_number_falls_when_a_request_ends_in_whatever_way(make_api: MakeApi, body: dict[str, Any]) -> None:
    api = make_api(quick, settings={"key_concurrency": "1"})
    api.app.add_middleware(Keys(a=Key()))
    for _ in range(3):
        assert api.post("/autocomplete", body, headers={"X-Key": "a"}).status_code in {200, 422}


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_refused_before_a_stream_begins(make_api: MakeApi, stream: bool) -> None:
    response = make_api(quick).complete(model_size="xl", stream=stream)
    assert (response.status_code, response.json["code"]) == (422, "unknown_model")


def test_a_server_that_stops_ends_answers_with_503_and_streams_with_an_error_event(make_api: MakeApi) -> None:
    api = make_api(hang, max_batch=6)
    streams: list[testing.Result] = []
    reader = threading.Thread(target=lambda: streams.append(api.complete(stream=True)))
    reader.start()
    api.pool.workers[0].wait(lambda worker: worker.num_running == 3)
    with held(api, 2) as requests:
        pass
    reader.join(5)
    for response in [request.result() for request in requests]:
        assert (response.status_code, response.json["code"]) == (503, "shutting_down")
        assert response.headers["Retry-After"] in {"1", "2", "3"}
    assert streams[0].text.startswith("event: error")
    assert "shutting_down" in streams[0].text
    assert api.complete().json["code"] == "shutting_down"
