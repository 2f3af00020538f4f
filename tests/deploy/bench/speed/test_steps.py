"""Replays of a decode step: every row has a context of its own, and no replay changes what the next one reads."""

from __future__ import annotations

import pytest
import torch

from deploy.bench.gpu.context import subject
from deploy.bench.speed.steps import DecodeSteps, time_replays
from tests.workers.engine.cuda.fake_cuda import fake_cuda


@pytest.fixture(scope="module")
def steps() -> DecodeSteps:
    return DecodeSteps(subject("embedded"), "cpu:0", "fp32", 3)


def logits_of(steps: DecodeSteps, num_rows: int, num_tokens: int) -> torch.Tensor:
    result = steps.replay(num_rows, num_tokens)()
    logits: torch.Tensor = result.logits  # type: ignore[attr-defined]
    return logits.clone()


def test_rows_have_different_contexts_that_do_not_grow(steps: DecodeSteps) -> None:
    first = logits_of(steps, 3, 84)
    assert not torch.allclose(first[0], first[1])
    # The token drawn is the next step's input; the position is not advanced.
    again = logits_of(steps, 3, 84)
    assert first.shape == again.shape
    assert not torch.allclose(first, logits_of(steps, 3, 150))


def test_more_rows_than_the_cache_holds_are_refused(steps: DecodeSteps) -> None:
    with pytest.raises(MemoryError, match="no room for 4 contexts"):
        steps.replay(4, 84)


def test_each_replay_is_timed(steps: DecodeSteps) -> None:
    times = steps.time(1, 84, warm_up_s=0.0, num_replays=4)
    assert len(times) == 4
    assert min(times) > 0


def test_events_between_replays_time_each_of_them() -> None:
    """With the stand-in for CUDA: an event ends one replay and begins the next."""
    with fake_cuda():
        calls = []
        times = time_replays(lambda: calls.append(len(calls)), is_cuda=True, warm_up_s=0.0, num_replays=5)
    assert len(times) == 5
    assert len(calls) == 6
