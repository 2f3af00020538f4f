"""A slot's app over a real service in this process (embedded checkpoint, fp32), and how its tests call it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import falcon
from falcon import testing
from prometheus_client.parser import text_string_to_metric_families

from shared.cancellation import HangupWatcher
from shared.errors import PROBLEM_JSON
from shared.plan import Model, Slot
from shared.protocol import Done, GenerateLine, GenerateRequest
from tests.workers.faults import Faults
from tests.workers.helpers import EMBEDDED, wait_until
from workers.engine.engine import EngineConfig
from workers.service import ACCEPTED_DELAY_S, SlotService

PROMPT = "The old man looked at the sea and"
GREEDY = {"max_new_tokens": 8, "temperature": 0.0}
HANGUPS = HangupWatcher()


def make_service(
    directory: Path = EMBEDDED,
    *,
    kind: type[SlotService] = SlotService,
    source: str = "embedded",
    revision: str = "",
    dtype: str = "fp32",
    cache: Path | None = None,
    max_batch: int = 4,
    step_delay_s: float = 0.0,
    accepted_delay_s: float = ACCEPTED_DELAY_S,
) -> SlotService:
    slot = Slot(index=3, device="cpu", model="embedded", socket="", max_batch=max_batch)
    model = Model("embedded", str(directory), source, n_ctx=1024, vocab_size=8192, revision=revision)
    config = EngineConfig(dtype=dtype, max_batch=max_batch, hang_s=0.0)

    def fail(error: BaseException) -> None:
        raise error

    return kind(
        slot, model, config, cache, runners=Faults(step_delay_s), on_fatal=fail, accepted_delay_s=accepted_delay_s
    )


@contextmanager
def warm_service(**settings: Any) -> Iterator[SlotService]:
    service = make_service(**settings)
    service.start(age=7)
    wait_until(lambda: service.is_warm)
    try:
        yield service
    finally:
        assert service.close()


def lines_of(service: SlotService, prompt: str | None, **fields: Any) -> list[GenerateLine]:
    """The lines of a branch, which is closed at its end."""
    branch = service.submit(GenerateRequest(prompt=prompt, **fields))
    try:
        return [line for lines in branch for line in lines]
    finally:
        branch.close()


def done_of(service: SlotService, prompt: str | None, **fields: Any) -> Done:
    """The last line of a branch that does not fail."""
    done = lines_of(service, prompt, **fields)[-1]
    assert isinstance(done, Done), done
    return done


def generate(client: testing.TestClient, **fields: Any) -> list[dict[str, Any]]:
    """The answer's lines."""
    result = client.simulate_post("/generate", json=fields)
    assert result.status == falcon.HTTP_200, result.text
    assert result.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in result.text.splitlines()]


@contextmanager
def open_stream(
    client: testing.TestClient, path: str, sock: Any = None, **fields: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """The answer's lines as they come; closes the response at the end, as a WSGI server does."""
    with open_body(client, path, sock, **fields) as body:
        yield (json.loads(line) for chunk in body for line in chunk.splitlines())


@contextmanager
def open_body(client: testing.TestClient, path: str, sock: Any = None, **fields: Any) -> Iterator[Iterator[bytes]]:
    environ = testing.create_environ(
        path, method="POST" if fields else "GET", body=json.dumps(fields) if fields else ""
    )
    if sock is not None:
        environ["gunicorn.socket"] = sock
    start_response = testing.StartResponseMock()
    body: Any = client.app(environ, start_response)
    assert start_response.status == falcon.HTTP_200
    try:
        yield iter(body)
    finally:
        body.close()


def problem(result: testing.Result) -> dict[str, Any]:
    assert result.headers["content-type"] == PROBLEM_JSON
    body: dict[str, Any] = result.json
    assert body["status"] == result.status_code
    return body


def metric(client: testing.TestClient, name: str, **labels: str) -> float:
    """A sample of the slot's metrics, 0 if it is absent."""
    text = client.simulate_get("/metrics").text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    found = [sample.value for sample in samples if (sample.name, sample.labels) == (name, {"slot": "3", **labels})]
    return found[0] if found else 0.0
