"""Several worker processes on a GPU: starts together, reloads, and one that fails.

The processes, the engines and the lock are real, the GPU's memory is a file (`tests.workers.gpu_workers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.memory_plan import WorkerNeeds, divide, needed_bytes
from tests.workers.engine.helpers import TINY
from tests.workers.gpu_workers import FakeGpu, FakeGpuWorker, WorkerOrder, context
from workers.engine.scheduler_output import SUFFIX_TOKENS

CARD_BYTES = 36 * 10**6
MAX_BATCH = 8
TOKEN_BYTES = TINY.n_layer * 2 * TINY.n_embd * 4
NEEDS = WorkerNeeds(
    weight_bytes=10**6,
    suffix_bytes=(MAX_BATCH * SUFFIX_TOKENS + 1) * TOKEN_BYTES,
    entry_bytes=TINY.n_positions * TOKEN_BYTES,
    other_bytes=10**6,
    max_batch=MAX_BATCH,
)
NUM_WORKERS = 4
Start = Callable[[WorkerOrder], FakeGpuWorker]


@pytest.fixture
def order(tmp_path: Path) -> WorkerOrder:
    """A worker of four, as planned: a reload holds one successor."""
    division = divide(CARD_BYTES, [NEEDS] * NUM_WORKERS)
    assert division is not None
    assert division.max_successors == 1
    memory = NEEDS.memory(division.num_entries)
    assert needed_bytes([memory] * NUM_WORKERS, 2) > CARD_BYTES  # a second successor would exceed the card
    fixed_bytes = memory.weight_bytes + memory.other_bytes
    return WorkerOrder(FakeGpu(tmp_path / "gpu", CARD_BYTES), tmp_path, fixed_bytes, MAX_BATCH, memory.cache_bytes)


@pytest.fixture
def start() -> Iterator[Start]:
    meeting = context.Barrier(NUM_WORKERS)
    started: list[FakeGpuWorker] = []

    def start_one(order: WorkerOrder) -> FakeGpuWorker:
        started.append(FakeGpuWorker(order, meeting))
        return started[-1]

    yield start_one
    for worker in started:
        worker.kill()


def test_four_workers_that_start_together_get_what_was_planned(order: WorkerOrder, start: Start) -> None:
    workers = [start(order) for _ in range(NUM_WORKERS)]
    assert [worker.wait_for("warm", "failed") for worker in workers] == [("warm", "None")] * NUM_WORKERS
    assert order.gpu.peak_bytes() == NUM_WORKERS * (order.fixed_bytes + (order.cache_bytes or 0))
    assert [worker.generate() for worker in workers] == [5] * NUM_WORKERS


def test_a_reload_and_a_crash_stay_within_the_card(order: WorkerOrder, start: Start) -> None:
    workers = [start(order) for _ in range(NUM_WORKERS)]
    for worker in workers:
        worker.wait_for("warm")
    for slot in range(2):
        successor = start(order)
        assert successor.wait_for("warm", "failed")[0] == "warm"
        workers[slot].stop()
        workers[slot] = successor
    workers[2].kill()
    workers[2] = start(order)
    assert workers[2].wait_for("warm", "failed")[0] == "warm"
    assert order.gpu.peak_bytes() == (NUM_WORKERS + 1) * (order.fixed_bytes + (order.cache_bytes or 0)) <= CARD_BYTES


def test_without_a_plan_workers_that_measure_together_exceed_the_card(order: WorkerOrder, start: Start) -> None:
    """Shows that the fake GPU can be exceeded: each takes a share of what was free before the others allocated."""
    workers = [start(replace(order, cache_bytes=None)) for _ in range(NUM_WORKERS)]
    states = [worker.wait_for("warm", "failed") for worker in workers]
    assert order.gpu.peak_bytes() > CARD_BYTES
    assert "failed" in [state for state, _ in states]


def test_a_worker_that_does_not_fit_says_why_while_the_others_serve(order: WorkerOrder, start: Start) -> None:
    other = start(replace(order, fixed_bytes=CARD_BYTES // 2, cache_bytes=NEEDS.memory(1).cache_bytes))
    other.wait_for("warm")
    workers = [start(order) for _ in range(3)]
    states = [worker.wait_for("warm", "failed") for worker in workers]
    [reason] = [reason for state, reason in states if state == "failed"]
    assert "MiB free, and the KV cache of this worker needs" in reason
    assert "TERCET_MAX_BATCH" in reason
    for worker, (state, _) in zip(workers, states, strict=True):
        if state == "warm":
            assert worker.generate() == 5
    other.stop()
    for worker, (state, _) in zip(workers, states, strict=True):
        if state == "failed":
            assert worker.wait_for("warm") == ("warm", "None")  # it tries again
    assert order.gpu.peak_bytes() <= CARD_BYTES


def test_the_lock_of_a_worker_that_dies_is_free(order: WorkerOrder, start: Start) -> None:
    hanging = start(replace(order, hangs_in_capture=True))
    hanging.wait_for("capturing")
    waiting = start(order)
    waiting.wait_for("loading")
    with pytest.raises(AssertionError, match="not within"):
        waiting.wait_for("locked", timeout_s=1.5)
    hanging.kill()
    assert waiting.wait_for("warm", "failed")[0] == "warm"
