"""The worker's HTTP face over a real service: embedded checkpoint, fp32, in this process, no server and no socket."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from shared.telemetry import format_traceback
from tests.workers.contract import GREEDY, PROMPT, STEP_MS, Endpoint, SlotContract, problem
from tests.workers.helpers import EMBEDDED, PATIENCE_S, wait_until
from tests.workers.slots import HANGUPS, endpoint_of, make_service, metric, warm_service
from workers.app import SlotApp
from workers.service import SlotService

# A text for which the tokenizer of `panicking` panics: its regular expression tries too many ways to match.
PANIC = "a" * 48 + "! eee"


@pytest.fixture
def panicking(tmp_path: Path) -> Iterator[Endpoint]:
    directory = tmp_path / "panicking"
    shutil.copytree(EMBEDDED, directory)
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, values["pre_tokenizer"]]}
    path.write_text(json.dumps(values))
    with warm_service(directory=directory, source="local") as service, endpoint_of(service) as client:
        yield client


def test_a_panic_in_the_tokenizer_is_that_requests_error(panicking: Endpoint) -> None:
    with structlog.testing.capture_logs() as logs:
        result = panicking.post("/generate", prompt=PANIC, sampling=GREEDY)
    assert result.status_code == 500
    assert problem(result)["code"] == "internal_error"
    assert PANIC[:8] not in result.text
    [event] = [event for event in logs if event["event"] == "unhandled_exception"]
    logged = format_traceback((type(event["exc_info"]), event["exc_info"], event["exc_info"].__traceback__))
    assert "pyo3_runtime.PanicException" in logged
    assert PANIC[:8] not in logged
    assert panicking.generate(prompt=PROMPT, sampling=GREEDY)[-1]["event"] == "done"


# Answers -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow() -> Iterator[SlotService]:
    with warm_service(step_delay_s=STEP_MS / 1e3) as service:
        yield service


@pytest.fixture(scope="module")
def endpoint(slow: SlotService) -> Iterator[Endpoint]:
    with endpoint_of(slow) as client:
        yield client


class TestSlotApp(SlotContract):
    """Without a server."""


def test_prompt_ids_are_used_as_sent_and_cut_at_their_start(client: Endpoint) -> None:
    _, whole = client.generate(prompt_ids=[5, 6, 7, 8], sampling=GREEDY, echo=True)
    _, cut = client.generate(prompt_ids=[5, 6, 7, 8], max_prompt_tokens=2, sampling=GREEDY, echo=True)
    assert (whole["prompt_ids"], cut["prompt_ids"]) == ([5, 6, 7, 8], [7, 8])


def test_a_single_line_ends_before_its_line_feed(client: Endpoint) -> None:
    [line_feed] = client.post("/tokenize", text="\n").json()["ids"]
    sampling = {**GREEDY, "logit_bias": [[line_feed, 100.0]], "single_line": True}
    _, done = client.generate(prompt=PROMPT, sampling=sampling)
    assert (done["finish_reason"], done["text"], done["token_ids"]) == ("stop", "", [line_feed])


# Refusals ----------------------------------------------------------------------------------------


def test_a_slot_without_a_model_is_not_ready() -> None:
    with endpoint_of(make_service()) as client:
        assert problem(client.post("/tokenize", text="a"))["code"] == "not_ready"
        result = client.post("/generate", prompt="a")
        assert (problem(result)["code"], result.status_code) == ("not_ready", 503)
        assert int(result.headers["retry-after"]) >= 1
        first = client.state()
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
    content = json.dumps({"prompt": PROMPT, "sampling": {"max_new_tokens": 1}}).encode()
    with warm_service(accepted_delay_s=PATIENCE_S) as service:
        lines = SlotApp(service, HANGUPS).generate(content, None)
        [chunk] = lines
        lines.close()
    assert [json.loads(line)["event"] for line in chunk.splitlines()] == ["accepted", "done"]


def test_the_state_stream_ends_when_the_slot_drains_and_running_sequences_finish() -> None:
    with warm_service(step_delay_s=0.02) as service, endpoint_of(service) as client:
        seen: list[dict[str, Any]] = []

        def read_states() -> None:
            with client.open() as states:
                seen.extend(states)

        reader = threading.Thread(target=read_states)
        reader.start()
        wait_until(lambda: bool(seen) and seen[-1]["state"] == "warm")
        with client.open(prompt=PROMPT, sampling=GREEDY) as lines:
            assert next(lines)["event"] == "accepted"
            service.drain(grace_s=30)
            refused = client.post("/generate", prompt=PROMPT)
            assert problem(refused)["code"] == "not_ready"
            assert next(lines)["finish_reason"] == "length"
        reader.join(PATIENCE_S)
        assert [state["state"] for state in seen if state["state"] != "warm"] == ["draining"]
        assert seen[-1]["state"] == "draining"
        assert (seen[0]["age"], seen[0]["device"], seen[0]["dtype"], seen[0]["n_ctx"]) == (7, "cpu", "fp32", 1024)
        assert seen[0]["ms_per_token"] > 0


def test_metrics_count_branches_and_tokens(client: Endpoint) -> None:
    def counters() -> list[float]:
        names = ("prompt_tokens", "generated_tokens", "cached_tokens")
        sequences = metric(client, "tercet_slot_sequences_total", finish_reason="length")
        return [sequences, *(metric(client, f"tercet_slot_{name}_total") for name in names)]

    before = counters()
    for _ in range(2):
        client.generate(prompt_ids=list(range(40, 72)), sampling=GREEDY)
    growth = [after - was for after, was in zip(counters(), before, strict=True)]
    assert growth[:3] == [2, 64, 16]
    assert growth[3] >= 31  # the second prompt
    assert metric(client, "tercet_slot_max_batch_branches") == 4
    assert metric(client, "tercet_slot_state", state="warm") == 1
