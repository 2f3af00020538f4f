"""Prompts and keys in requests of every kind: they reach no log, no metric and no other client."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import falcon
import pytest
import structlog

from shared.api_keys import new_key
from shared.protocol import Accepted, Failed, GenerateRequest
from shared.telemetry import format_traceback
from tests.bad_requests import HttpRequest, call_app
from tests.canaries import Canaries, canary_requests
from tests.gateway.api.conftest import MakeApi
from tests.gateway.generation.stubs import Break, Refusal, Step, three_texts

PROMPT = "quokkaword zebrafishword axolotlword"


def respond(request: GenerateRequest) -> Iterator[Step]:
    """Every fourth branch fails, each in another way."""
    kinds: list[Iterable[Step]] = [
        [Refusal(500, "internal_error")],
        [Accepted(), Break()],
        [Accepted(), Failed(code="device_error", detail=f"It failed at {request.prompt}.")],
    ]
    kind = request.seed % 12
    yield from kinds[kind] if kind < 3 else three_texts(request)


class Failing:
    def on_post(self, req: falcon.Request, _resp: falcon.Response) -> None:
        raise KeyError(req.bounded_stream.read().decode())


def test_neither_prompts_nor_keys_reach_a_log_a_metric_or_another_client(
    make_api: MakeApi, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key, _ = new_key(tmp_path / "keys", "first")
    other_key, _ = new_key(tmp_path / "keys", "other")
    canaries = Canaries(PROMPT, key)
    api = make_api(respond, settings={"keys": str(tmp_path / "keys"), "key_rate": "0"}, max_batch=48)
    api.app.add_route("/failing", Failing())
    failing = HttpRequest("POST", "/failing", PROMPT.encode(), {"Authorization": f"Bearer {key}"})
    statuses: Counter[int] = Counter()
    with structlog.testing.capture_logs() as events:
        for request in (*canary_requests(canaries), failing):
            status, _, _ = call_app(api.app, request)
            statuses[status] += 1
        others = [
            call_app(api.app, HttpRequest(method, path, body, {"Authorization": f"Bearer {other_key}"}))
            for method, path, body in (
                ("GET", "/metrics", b""),
                ("GET", "/health/ready", b""),
                ("GET", "/slots", b""),
                ("POST", "/autocomplete", b'{"context": "He saw", "seed": 4}'),
                ("POST", "/autocomplete", b"{"),
                ("POST", "/feedback", b'{"id": "a", "index": 0, "action": "accepted"}'),
            )
        ]
    assert statuses.total() >= 100
    assert {200, 400, 401, 404, 405, 413, 415, 421, 422, 500} <= statuses.keys(), statuses
    assert [status for status, _, _ in others[:4]] == [200] * 4, others[3]
    for _, headers, body in others:
        assert not canaries.found_in(f"{headers} {body.decode()}")
    assert sum(event["event"] == "request_finished" for event in events) == statuses.total() + len(others)
    for event in events:
        if error := event.get("exc_info"):
            event["exc_info"] = format_traceback((type(error), error, error.__traceback__))
        assert not canaries.found_in(str(event)), event
    assert not canaries.found_in(caplog.text)
