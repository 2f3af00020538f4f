"""Every combination of the outcomes of three branches gives one well-formed answer, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from falcon import testing

from shared import wire
from shared.protocol import Accepted, GenerateRequest
from tests.gateway.api.conftest import MakeApi
from tests.gateway.generation.stubs import LOGPROBS, TEXTS, Break, Hang, Raw, Refusal, Step, three_texts

# The error code of a branch that ends so on every slot.
CODES = {
    "crash": "broken",
    "timeout": "deadline_exceeded",
    "5xx": "internal_error",
    "garbage": "garbage",
    "oversize": "oversize",
}
# In place of the client's own bound: 324 lines of a megabyte take longer than the time limit on a busy machine.
MAX_LINE_BYTES = 1 << 15
ENDS: dict[str, Step] = {
    "crash": Break(),
    "timeout": Hang(),
    "garbage": Raw(b"<html>\n"),
    "oversize": Raw(b"x" * (MAX_LINE_BYTES + 1)),
}
COMBINATIONS = sorted(product(["ok", *CODES], repeat=3), key=lambda outcomes: "timeout" in outcomes)
# Where a branch hangs, its request lasts so long. The others must not, however busy the machine is.
MAX_TIME_S, LONG_S = 5.0, 30.0


def respond(request: GenerateRequest) -> Iterator[Step]:
    """The request's id says how each branch ends; the seed is the branch's number."""
    outcome = request.request_id.split("-")[request.seed]
    if outcome == "5xx":
        yield Refusal(500, "internal_error")
    elif outcome == "ok":
        yield from three_texts(request)
    else:
        yield Accepted()
        yield ENDS[outcome]


def test_all_combinations_of_outcomes_are_merged(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", MAX_LINE_BYTES)
    api = make_api(respond, respond, max_batch=len(COMBINATIONS) * 3, num_threads=300, num_retries=10_000)

    def request(outcomes: tuple[str, ...]) -> testing.Result:
        headers = {"X-Request-Id": "-".join(outcomes)}
        max_time_s = MAX_TIME_S if "timeout" in outcomes else LONG_S
        return api.post("/autocomplete", {"context": "He saw", "seed": 0, "max_time": max_time_s}, headers=headers)

    with ThreadPoolExecutor(96) as threads:
        responses = list(threads.map(request, COMBINATIONS))
    assert len(responses) == 216
    for outcomes, response in zip(COMBINATIONS, responses, strict=True):
        check(outcomes, response)
    api.pool.wait_until_idle()


def check(outcomes: tuple[str, ...], response: testing.Result) -> None:
    body = response.json
    succeeded = [branch for branch, outcome in enumerate(outcomes) if outcome == "ok"]
    failed = [(branch, CODES[outcome]) for branch, outcome in enumerate(outcomes) if outcome != "ok"]
    if succeeded:
        assert response.status_code == 200, outcomes
        best_first = sorted(succeeded, key=lambda branch: -LOGPROBS[branch])
        assert [sentence["value"] for sentence in body["sentences"]] == [TEXTS[branch] for branch in best_first]
        assert [sentence["seed"] for sentence in body["sentences"]] == best_first
        assert body["partial"] == bool(failed)
        assert [(error["branch"], error["code"]) for error in body["errors"]] == failed
        return
    is_late = set(outcomes) == {"timeout"}
    assert response.status_code == (504 if is_late else 503), outcomes
    assert response.headers["content-type"] == "application/problem+json"
    assert 1 <= int(response.headers["retry-after"]) <= 3
    assert body["code"] == ("deadline_exceeded" if is_late else "no_completion")
    if not is_late:
        assert all(code in body["detail"] for _, code in failed)
