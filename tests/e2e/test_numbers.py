"""No number of a client's makes a worker look faulty, or is answered by an error of the server's side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.e2e.edge_numbers import NOT_JSON, Field, merged, numeric_fields, written
from tests.e2e.harness import Tercet, metric, until

# Stop strings end a text after a few tokens, whatever its length. Sampling is plain, without limits of candidates.
FEW_TOKENS = ["e", "a", "o", "i"]
WITHOUT_LIMITS = {"stop": FEW_TOKENS, "top_k": 0, "top_p": 1, "seed": 3}
TGI = {"parameters": {**WITHOUT_LIMITS, "do_sample": True}}
BODIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("/autocomplete", "/jobs", "/v1/completions"), WITHOUT_LIMITS),
    **dict.fromkeys(("/", "/generate", "/generate_stream"), TGI),
}
Route = tuple[str, dict[str, Any], list[Field]]  # path, a body that is answered, numeric fields


@contextmanager
def no_fault(tercet: Tercet) -> Iterator[None]:
    """Fails if a worker fails meanwhile, or a gateway raises an exception."""
    kinds = ("unhandled_exception", "engine_failed", "step_failed", "worker_ended")
    before = {kind: len(tercet.events(kind)) for kind in kinds}
    yield
    until(lambda: not metric(tercet, "tercet_open_jobs"), 60, "the end of all jobs")
    assert {kind: len(tercet.events(kind)) for kind in kinds} == before
    assert {slot["state"] for slot in tercet.slots()} == {"warm"}


def routes(tercet: Tercet) -> list[Route]:
    document = tercet.client.get("/openapi.json").json()
    found = []
    for path, methods in document["paths"].items():
        if "requestBody" not in (operation := methods.get("post", {})):
            continue
        content = operation["requestBody"]["content"]["application/json"]
        body = merged(next(iter(content["examples"].values()))["value"], BODIES.get(path, {}))
        if path == "/feedback":
            body["id"] = tercet.ask(seed=1)["id"]
        if fields := list(numeric_fields(content["schema"], document["components"]["schemas"])):
            found.append((path, body, fields))
    return found


def check(tercet: Tercet, path: str, body: dict[str, Any], numbers: dict[Field, str]) -> None:
    """Fails on an answer of 500 and above, and on a refusal that names none of the fields."""
    content = written(body, numbers)
    answer = tercet.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code < 500, (path, content, answer.text)
    if answer.status_code in {400, 422} and not set(NOT_JSON) & set(numbers.values()):
        names = {name for field in numbers for name in field.names}
        assert any(name in answer.text for name in names), (path, content, answer.text)


def test_a_number_at_the_edge_of_its_type_is_used_or_refused_by_name(tercet: Tercet) -> None:
    found = routes(tercet)
    assert {"/autocomplete", "/feedback", "/jobs", "/v1/completions", "/generate"} <= {path for path, _, _ in found}
    names = {name for _, _, fields in found for field in fields for name in field.names}
    assert {"temperature", "logit_bias", "prompt", "seed", "kept", "truncate", "max_time"} <= names
    with no_fault(tercet):
        for path, body, fields in found:
            if path in {"/", "/generate_stream"}:  # their schema is that of /generate
                continue
            for field in fields:
                # The gateway refuses the others: tests/gateway/api/test_bounds.py.
                for number in (*field.valid_values, "1e400", "NaN"):
                    check(tercet, path, body, {field: number})
