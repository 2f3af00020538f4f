"""Steps computed ahead, in one call: whoever comes, leaves or ends stops them after the one under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.workers.engine.helpers import generate, running_engine, wait_until
from workers.engine.cpu import runner as model_runner
from workers.engine.cpu.forward import ForwardPass
from workers.engine.cpu.kernels import HAS_DOT_PRODUCTS
from workers.engine.engine import Engine
from workers.engine.model.loader import LoadedModel
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams
from workers.engine.result_stream import ResultStream
from workers.engine.sampling import Draw
from workers.engine.scheduler_output import BatchRow
from workers.engine.sequence import Sequence

pytestmark = pytest.mark.skipif(
    not HAS_DOT_PRODUCTS, reason="this CPU has no AVX-512 VNNI, so every step is computed by itself"
)
USUAL = SamplingParams(max_new_tokens=100)
PROMPT = (40, 41, 42)


class Calls:
    """Calls of several steps: how many were asked for, how many done. `meanwhile` is done at the next one's beginning,
    in the engine's own thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: list[tuple[int, int]] = []
        self.meanwhile: Callable[[], object] | None = None
        original = ForwardPass.decode

        def steps(own: ForwardPass, rows: list[BatchRow], draws: list[Draw], number: int) -> list[list[GeneratedToken]]:
            if self.meanwhile is not None and number > 1:
                self.meanwhile()
                self.meanwhile = None
            done = original(own, rows, draws, number)
            self.numbers.append((number, len(done)))
            return done

        monkeypatch.setattr(ForwardPass, "decode", steps)
        monkeypatch.setattr(model_runner, "MAX_STEPS_PER_CALL", 1000)
        monkeypatch.setattr(model_runner, "MAX_CALL_S", 1000.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def know_a_step(engine: Engine, calls: Calls) -> None:
    """How long one takes is known after the first."""
    generate(engine, [60, 61], replace(USUAL, max_new_tokens=2))
    calls.numbers.clear()


def test_where_nobody_comes_all_steps_are_one_call(embedded_int8: LoadedModel, calls: Calls) -> None:
    with running_engine(embedded_int8) as engine:
        know_a_step(engine, calls)
        finished = generate(engine, list(PROMPT), USUAL)
    assert len(finished.token_ids) == 100
    assert calls.numbers == [(99, 99)]


def test_who_cancels_stops_them(embedded_int8: LoadedModel, calls: Calls) -> None:
    with running_engine(embedded_int8) as engine:
        know_a_step(engine, calls)
        generations: list[ResultStream] = []

        def cancel() -> None:
            wait_until(lambda: bool(generations))
            generations[0].cancel()

        calls.meanwhile = cancel
        generations.append(engine.submit(EngineRequest(PROMPT, USUAL, seed=0)))
        finished = generations[0].result()
    assert (finished.finish_reason, len(finished.token_ids)) == ("cancelled", 2)
    assert calls.numbers == [(99, 1)]


def test_who_comes_stops_them(embedded_int8: LoadedModel, calls: Calls) -> None:
    with running_engine(embedded_int8) as engine:
        alone = generate(engine, list(PROMPT), USUAL)
        know_a_step(engine, calls)
        newcomers: list[ResultStream] = []
        calls.meanwhile = lambda: newcomers.append(
            engine.submit(EngineRequest((50, 51), replace(USUAL, max_new_tokens=5), seed=0))
        )
        assert generate(engine, list(PROMPT), USUAL).token_ids == alone.token_ids
        assert len(newcomers[0].result().token_ids) == 5
    # One step, and one beside the newcomer's prompt; two rows' first step is alone, to see how long it takes.
    assert calls.numbers == [(99, 1), (1, 1), (3, 3), (93, 93)]


def test_a_text_that_ends_stops_them(embedded_int8: LoadedModel, calls: Calls) -> None:
    with running_engine(embedded_int8) as engine:
        text = generate(engine, list(PROMPT), USUAL).token_ids
    number = next(at for at in range(10, 100) if text[at] not in text[:at])
    config = replace(embedded_int8.config, eos_token_id=text[number])
    loaded = replace(embedded_int8, model=replace(embedded_int8.model, config=config))
    with running_engine(loaded) as engine:
        know_a_step(engine, calls)
        finished = generate(engine, list(PROMPT), USUAL)
    assert calls.numbers == [(99, number)]
    assert (finished.finish_reason, finished.token_ids) == ("eos", text[: number + 1])


@pytest.mark.parametrize(
    ("more", "num_told", "seconds"),
    [
        ({}, 1, model_runner.MAX_CALL_S),
        ({"deadline": 1000.02}, 1, 0.02),
        ({"deadline": 1001.0}, 1, model_runner.MAX_CALL_S),
        ({"stream": True}, 1, 0.0),
        ({"stream": True}, 4, 0.01),
        ({"sampling": replace(USUAL, single_line=True)}, 1, 0.01),
        ({"sampling": replace(USUAL, stop=(".",))}, 1, 0.01),
    ],
)
def test_how_far_ahead_depends_on_who_waits(more: dict[str, Any], num_told: int, seconds: float) -> None:
    request = replace(EngineRequest(PROMPT, USUAL, seed=0), **more)
    sequence = Sequence(request, ResultStream(), start_id=0, tokenizer=None)
    for _ in range(num_told):
        sequence.token_ids.append(7)
    assert model_runner.max_call_s(sequence, 1000.0) == pytest.approx(seconds)
