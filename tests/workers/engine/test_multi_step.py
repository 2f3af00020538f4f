"""Multi-step decode: several decode steps per call, until a sequence arrives, ends or is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.workers.engine.helpers import generate, running_engine
from tests.workers.helpers import wait_until
from workers.engine.batch import RunnerOutput, SchedulerOutput
from workers.engine.cpu.runner import CpuRunner
from workers.engine.engine import Engine
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams
from workers.engine.sequence import (
    MAX_DELIVERY_DELAY_S,
    MAX_MULTI_STEP_S,
    NUM_DELIVERED_SINGLY,
    ResultStream,
    Sequence,
)

PARAMS = SamplingParams(max_new_tokens=100)
PROMPT = (40, 41, 42)
MAX_STEPS = 16  # per call


class Calls:
    """The runner's calls: how many rows and decode steps each had.

    `meanwhile`, if set, is called in the engine's thread just before a call that may compute more than one step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_steps: list[tuple[int, int]] = []
        self.meanwhile: Callable[[], object] | None = None
        run = CpuRunner.run

        def observed(runner: CpuRunner, scheduled: SchedulerOutput) -> RunnerOutput:
            is_decode = not scheduled.chunks and not scheduled.prefilled_rows
            # The duration of a step is known after the first decode call.
            if self.meanwhile is not None and is_decode and self.num_steps and scheduled.allows_multi_step:
                self.meanwhile()
                self.meanwhile = None
                output = run(runner, scheduled)
                assert output.num_steps == 1  # interrupted after the current step
            else:
                output = run(runner, scheduled)
            if is_decode:
                self.num_steps.append((len(scheduled.rows), output.num_steps))
            return output

        monkeypatch.setattr(CpuRunner, "run", observed)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def learn_step_duration(engine: Engine, calls: Calls) -> None:
    """The runner decides on the number of steps by how long one took."""
    generate(engine, [60, 61], structs.replace(PARAMS, max_new_tokens=3))
    calls.num_steps.clear()
    calls.num_steps.append((1, 1))


def test_undisturbed_steps_are_computed_in_few_calls(embedded_int8: LoadedModel, calls: Calls) -> None:
    with running_engine(embedded_int8) as engine:
        learn_step_duration(engine, calls)
        finished = generate(engine, list(PROMPT), PARAMS)
    assert len(finished.token_ids) == 100
    numbers = [number for _, number in calls.num_steps[1:]]
    assert sum(numbers) == 99  # the first token is drawn from the prompt's logits
    assert max(numbers) > 1
    assert max(numbers) <= MAX_STEPS


def test_cancelling_interrupts_a_multi_step_decode(embedded_int8: LoadedModel, calls: Calls) -> None:
    with running_engine(embedded_int8) as engine:
        learn_step_duration(engine, calls)
        streams: list[ResultStream] = []

        def cancel() -> None:
            wait_until(lambda: bool(streams))
            streams[0].cancel()

        calls.meanwhile = cancel
        streams.append(engine.submit(EngineRequest(PROMPT, PARAMS, seed=0)))
        finished = streams[0].result()
    assert (finished.finish_reason, len(finished.token_ids)) == ("cancelled", 2)


def test_a_new_request_interrupts_a_multi_step_decode(embedded_int8: LoadedModel, calls: Calls) -> None:
    with running_engine(embedded_int8) as engine:
        alone = generate(engine, list(PROMPT), PARAMS)
        learn_step_duration(engine, calls)
        streams: list[ResultStream] = []
        calls.meanwhile = lambda: streams.append(
            engine.submit(EngineRequest((50, 51), structs.replace(PARAMS, max_new_tokens=5), seed=0))
        )
        assert generate(engine, list(PROMPT), PARAMS).token_ids == alone.token_ids
        assert len(streams[0].result().token_ids) == 5
    assert calls.num_steps[1] == (1, 1)
    assert calls.num_steps[2][0] == 2  # after the step with the new prompt, both are decoded together
    assert sum(number for rows, number in calls.num_steps if rows == 2) == 4


def test_the_end_of_a_sequence_interrupts_a_multi_step_decode(embedded_int8: LoadedModel, calls: Calls) -> None:
    """No step is computed after the one that draws the end token."""
    with running_engine(embedded_int8) as engine:
        text = generate(engine, list(PROMPT), PARAMS).token_ids
    number = next(at for at in range(10, 100) if text[at] not in text[:at])
    config = replace(embedded_int8.config, eos_token_ids=(text[number],))
    loaded = replace(embedded_int8, model=replace(embedded_int8.model, config=config))
    with running_engine(loaded) as engine:
        learn_step_duration(engine, calls)
        finished = generate(engine, list(PROMPT), PARAMS)
    assert sum(number for _, number in calls.num_steps[1:]) == number
    assert (finished.finish_reason, finished.token_ids) == ("eos", text[: number + 1])


@pytest.mark.parametrize(
    ("more", "num_tokens", "budget_s"),
    [
        ({}, 1, MAX_MULTI_STEP_S),
        ({"deadline": 1000.02}, 1, 0.02),
        ({"deadline": 1001.0}, 1, MAX_MULTI_STEP_S),
        ({"stream": True}, 1, 0.0),
        ({"stream": True}, NUM_DELIVERED_SINGLY, MAX_DELIVERY_DELAY_S),
        ({"sampling": structs.replace(PARAMS, single_line=True)}, 1, MAX_DELIVERY_DELAY_S),
        ({"sampling": structs.replace(PARAMS, stop=(".",))}, 1, MAX_DELIVERY_DELAY_S),
    ],
)
def test_the_budget_follows_what_the_caller_waits_for(
    embedded_int8: LoadedModel, more: dict[str, Any], num_tokens: int, budget_s: float
) -> None:
    request = replace(EngineRequest(PROMPT, PARAMS, seed=0), **more)
    sequence = Sequence(request, ResultStream(), start_id=0, healing=embedded_int8.healing)
    for _ in range(num_tokens):
        sequence.append(GeneratedToken(7, -1.0), (), 1000.0)
    assert sequence.multi_step_budget_s(1000.0) == pytest.approx(budget_s)
