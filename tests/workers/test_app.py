"""The worker's HTTP face over a real service: embedded checkpoint, fp32, in this process, no server and no socket."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import falcon
import httpx
import pytest
import structlog
from falcon import testing

from shared.telemetry import format_traceback
from tests.workers.contract import STEP_MS, Endpoint, SlotContract
from tests.workers.helpers import EMBEDDED, PATIENCE_S, wait_until
from tests.workers.slots import (
    GREEDY,
    HANGUPS,
    PROMPT,
    generate,
    make_service,
    metric,
    open_body,
    open_stream,
    problem,
    warm_service,
)
from workers.app import SlotApp
from workers.service import SlotService

# A text for which the tokenizer of `panicking` panics: its regular expression tries too many ways to match.
PANIC = "a" * 48 + "! eee"


@pytest.fixture
def panicking(tmp_path: Path) -> Iterator[testing.TestClient]:
    directory = tmp_path / "panicking"
    shutil.copytree(EMBEDDED, directory)
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, values["pre_tokenizer"]]}
    path.write_text(json.dumps(values))
    with warm_service(directory=directory, source="local") as service:
        yield testing.TestClient(SlotApp(service, HANGUPS))


def test_a_panic_in_the_tokenizer_is_that_requests_error(panicking: testing.TestClient) -> None:
    with structlog.testing.capture_logs() as logs:
        result = panicking.simulate_post("/generate", json={"prompt": PANIC, "sampling": GREEDY})
    assert result.status_code == 500
    assert problem(result)["code"] == "internal_error"
    assert PANIC[:8] not in result.text
    [event] = [event for event in logs if event["event"] == "unhandled_exception"]
    logged = format_traceback((type(event["exc_info"]), event["exc_info"], event["exc_info"].__traceback__))
    assert "pyo3_runtime.PanicException" in logged
    assert PANIC[:8] not in logged
    assert generate(panicking, prompt=PROMPT, sampling=GREEDY)[-1]["event"] == "done"


# Answers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow() -> Iterator[SlotService]:
    with warm_service(step_delay_s=STEP_MS / 1e3) as service:
        yield service


@pytest.fixture(scope="module")
def endpoint(slow: SlotService) -> Iterator[Endpoint]:
    with httpx.Client(transport=httpx.WSGITransport(SlotApp(slow, HANGUPS))) as client:
        yield Endpoint("http://slot", client=client)


class TestSlotApp(SlotContract):
    """Without a server."""


def test_prompt_ids_are_used_as_sent_and_cut_at_their_start(client: testing.TestClient) -> None:
    _, whole = generate(client, prompt_ids=[5, 6, 7, 8], sampling=GREEDY, echo=True)
    _, cut = generate(client, prompt_ids=[5, 6, 7, 8], max_prompt_tokens=2, sampling=GREEDY, echo=True)
    assert (whole["prompt_ids"], cut["prompt_ids"]) == ([5, 6, 7, 8], [7, 8])


def test_a_single_line_ends_before_its_line_feed(client: testing.TestClient) -> None:
    [line_feed] = client.simulate_post("/tokenize", json={"text": "\n"}).json["ids"]
    sampling = {**GREEDY, "logit_bias": [[line_feed, 100.0]], "single_line": True}
    _, done = generate(client, prompt=PROMPT, sampling=sampling)
    assert (done["finish_reason"], done["text"], done["token_ids"]) == ("stop", "", [line_feed])


# Refusals ----------------------------------------------------------------------------------------


def test_a_slot_without_a_model_is_not_ready() -> None:
    client = testing.TestClient(SlotApp(make_service(), HANGUPS))
    assert problem(client.simulate_post("/tokenize", json={"text": "a"}))["code"] == "not_ready"
    result = client.simulate_post("/generate", json={"prompt": "a"})
    assert problem(result)["code"] == "not_ready"
    assert result.status == falcon.HTTP_503
    assert int(result.headers["retry-after"]) >= 1
    with open_stream(client, "/state") as states:
        first = next(states)
    assert (first["state"], first["model"], first["max_batch"], first["n_ctx"]) == ("starting", "embedded", 4, 0)
    assert metric(client, "tercet_slot_state", state="starting") == 1


# Time, cancellation, state -----------------------------------------------------------------------


def test_the_chunk_with_the_last_line_is_known_as_the_last(slow: SlotService) -> None:
    content = json.dumps({"prompt": PROMPT, "sampling": GREEDY}).encode()
    lines = SlotApp(slow, HANGUPS).generate(content, None)
    seen = [(chunk.splitlines()[-1][:20], lines.is_complete) for chunk in lines]
    lines.close()
    assert seen == [(b'{"event":"accepted"}', False), (b'{"event":"done","tex', True)]


def test_a_branch_that_ends_at_once_is_one_chunk() -> None:
    with warm_service(accepted_delay_s=PATIENCE_S) as service:
        client = testing.TestClient(SlotApp(service, HANGUPS))
        with open_body(client, "/generate", prompt=PROMPT, sampling={"max_new_tokens": 1}) as body:
            [chunk] = body
    assert [json.loads(line)["event"] for line in chunk.splitlines()] == ["accepted", "done"]


def test_the_state_stream_ends_when_the_slot_drains_and_running_sequences_finish() -> None:
    with warm_service(step_delay_s=0.02) as service:
        client = testing.TestClient(SlotApp(service, HANGUPS))
        seen: list[dict[str, Any]] = []

        def read_states() -> None:
            with open_stream(client, "/state") as states:
                seen.extend(states)

        reader = threading.Thread(target=read_states)
        reader.start()
        wait_until(lambda: bool(seen) and seen[-1]["state"] == "warm")
        with open_stream(client, "/generate", prompt=PROMPT, sampling=GREEDY) as lines:
            assert next(lines)["event"] == "accepted"
            service.drain(grace_s=30)
            refused = client.simulate_post("/generate", json={"prompt": PROMPT})
            assert problem(refused)["code"] == "not_ready"
            assert next(lines)["finish_reason"] == "length"
        reader.join(PATIENCE_S)
        assert [state["state"] for state in seen if state["state"] != "warm"] == ["draining"]
        assert seen[-1]["state"] == "draining"
        assert (seen[0]["age"], seen[0]["device"], seen[0]["dtype"], seen[0]["n_ctx"]) == (7, "cpu", "fp32", 1024)
        assert seen[0]["ms_per_token"] > 0


def test_metrics_count_branches_and_tokens(client: testing.TestClient) -> None:
    def counters() -> list[float]:
        names = ("prompt_tokens", "generated_tokens", "cached_tokens")
        sequences = metric(client, "tercet_slot_sequences_total", finish_reason="length")
        return [sequences, *(metric(client, f"tercet_slot_{name}_total") for name in names)]

    before = counters()
    for _ in range(2):
        generate(client, prompt_ids=list(range(40, 72)), sampling=GREEDY)
    growth = [after - was for after, was in zip(counters(), before, strict=True)]
    assert growth[:3] == [2, 64, 16]
    assert growth[3] >= 31  # the second prompt
    assert metric(client, "tercet_slot_max_batch_branches") == 4
    assert metric(client, "tercet_slot_state", state="warm") == 1
