"""The engine in its thread: ends of sequences, refusals, draining."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.workers.engine.helpers import generate, loading_engine, running_engine
from tests.workers.helpers import wait_until
from workers.engine.engine import Engine, EngineConfig
from workers.engine.failures import EngineNotReady, InvalidPrompt
from workers.engine.loader import LoadedModel, ProgressFn
from workers.engine.request import EngineRequest, SamplingParams

LONG = SamplingParams(max_new_tokens=100)


def request(params: SamplingParams = LONG, **more: object) -> EngineRequest:
    return EngineRequest((1, 2, 3), params, 0, **more)  # type: ignore[arg-type]


def test_a_step_that_would_end_past_the_deadline_is_not_begun(tiny: LoadedModel) -> None:
    with running_engine(tiny, step_delay_s=0.3) as engine:
        deadline = time.monotonic() + 0.75
        finished = engine.submit(request(deadline=deadline)).result()
        assert finished.finish_reason == "deadline"
        assert finished.token_ids
        assert finished.ended_at is not None
        assert finished.ended_at < deadline


@pytest.mark.parametrize(
    ("prompt", "params", "problem"),
    [
        ((512,), LONG, "511"),
        ((-1,), LONG, "511"),
        ((1,) * 632, SamplingParams(9), r"632.*\b9\b.*\b640"),
        ((1,), SamplingParams(logit_bias=((512, 1.0),)), "logit_bias .* 511"),
        ((1,), SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias"),
        ((1,), SamplingParams(logit_bias=((3, 100.5),)), "logit_bias .* 100"),
        ((1,), SamplingParams(logit_bias=((3, 1.0), (3, 2.0))), "logit_bias .* once"),
        ((1,), SamplingParams(logit_bias=tuple((id_, 1.0) for id_ in range(1025))), "logit_bias .* 1024"),
        ((1,), SamplingParams(first_rank=512), "first_rank"),
        ((1,), SamplingParams(stop=("",)), "empty"),
        ((1,), SamplingParams(stop=("x",)), "tokenizer"),
    ],
)
def test_requests_that_the_model_can_never_serve_are_refused(
    tiny: LoadedModel, prompt: tuple[int, ...], params: SamplingParams, problem: str
) -> None:
    with running_engine(tiny) as engine, pytest.raises(InvalidPrompt, match=problem):
        engine.submit(EngineRequest(prompt, params, 0))


def test_a_failed_load_is_repeated(tiny: LoadedModel) -> None:
    states: list[tuple[str, str | None]] = []
    attempts: list[float] = []

    def load(progress: ProgressFn) -> LoadedModel:
        attempts.append(time.monotonic())
        progress(0.5)
        if len(attempts) == 1:
            raise ValueError("text of a library, which stays in the log")
        return tiny

    def on_change() -> None:
        status = engine.status()
        if not states or states[-1] != (status.state, status.reason):
            states.append((status.state, status.reason))

    engine = Engine(EngineConfig(hang_s=0), load, on_change=on_change, on_fatal=lambda _: None)
    with pytest.raises(EngineNotReady):
        engine.submit(request())
    engine.start()
    try:
        wait_until(lambda: engine.status().state == "warm")
        assert 1 <= attempts[1] - attempts[0] < 10  # a second, and what a busy machine adds
        assert states == [
            ("loading", None),
            ("failed", "The model could not be loaded; the worker's log has the reason."),
            ("loading", None),
            ("warm", None),
        ]
        assert engine.status().ms_per_token > 0
        assert engine.status().failures == {"load_error": 1}
    finally:
        engine.stop(0)


def test_stop_ends_an_engine_whose_model_never_loads() -> None:
    def load(_: ProgressFn) -> LoadedModel:
        raise OSError("never")

    with loading_engine(load) as (engine, _):
        wait_until(lambda: engine.status().state == "failed")
    wait_until(lambda: not any(thread.name == "engine" for thread in threading.enumerate()))


def test_a_draining_engine_cancels_after_its_grace(tiny: LoadedModel) -> None:
    with running_engine(tiny, step_delay_s=0.05) as engine:
        running = engine.submit(request())
        engine.stop(grace_s=0.2)
        assert running.result().finish_reason == "cancelled"


def thread_cpu_s() -> dict[int, float]:
    """CPU time so far of each thread of this process, by its kernel id."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            found[int(task.name)] = (int(fields[11]) + int(fields[12])) / ticks_per_s
    return found


def test_an_idle_engine_uses_no_cpu_time(tiny: LoadedModel) -> None:
    others = thread_cpu_s().keys()
    with running_engine(tiny) as engine:
        generate(engine, [1], SamplingParams(1))
        time.sleep(0.05)
        before = {thread: cpu_s for thread, cpu_s in thread_cpu_s().items() if thread not in others}
        time.sleep(1.0)
        after = thread_cpu_s()
        assert before
        assert sum(after[thread] - cpu_s for thread, cpu_s in before.items()) < 0.05
        assert engine.status().num_running == 0


def test_torch_keeps_its_number_of_threads_by_default(tiny: LoadedModel) -> None:
    before = torch.get_num_threads()
    with running_engine(tiny, num_threads=None):
        assert torch.get_num_threads() == before
