"""The division of a GPU's memory among its workers, for cards and models of published sizes."""

from __future__ import annotations

import random

import pytest

from deploy.tuning.gpu_memory import memory_shape
from shared.memory_plan import ModelShape, SlotMemory, divide, largest, needed_bytes, usable_bytes, worker_needs
from tests.workers.engine.helpers import TINY
from workers.engine.loader import random_weights
from workers.engine.model.config import SHAPES

GIB = 1 << 30
CARDS = {"T4": int(14.6 * GIB), "A10": 22 * GIB, "H100": 79 * GIB}  # as torch reports them
SMALL, MEDIUM = (memory_shape(SHAPES[name]) for name in ("small", "medium"))
BATCH = 48


def test_needs_are_those_of_the_published_models() -> None:
    # 124,439,808 and 354,823,168 parameters (Radford et al. 2019, as counted by transformers), and an untied head.
    assert SMALL.num_weights == 124_439_808 + 50257 * 768
    assert MEDIUM.num_weights == 354_823_168 + 50257 * 1024
    small = worker_needs(SMALL, "bf16", BATCH)
    assert small.entry_bytes == 1024 * 12 * 2 * 768 * 2
    assert small.suffix_bytes == (48 * 255 + 1) * 12 * 2 * 768 * 2
    assert worker_needs(SMALL, "fp32", BATCH).entry_bytes == 2 * small.entry_bytes
    assert worker_needs(SMALL, "auto", BATCH) == small


def test_weights_are_those_that_are_loaded() -> None:
    weights = sum(tensor.numel() for tensor in random_weights(TINY).values())
    assert memory_shape(TINY).num_weights == weights + TINY.vocab_size * TINY.n_embd  # a head of its own


@pytest.mark.parametrize(
    ("card", "shape", "expected"),
    [
        # For one to four workers: prefix-cache entries of each, and successors that a reload may load at a time.
        ("T4", SMALL, [(48, 1), (48, 1), (43, 1), (24, 1)]),
        ("T4", MEDIUM, [(38, 1), (38, 0), (15, 0), (3, 0)]),
        ("A10", SMALL, [(48, 1)] * 4),
        ("A10", MEDIUM, [(48, 1), (39, 1), (21, 1), (21, 0)]),
        ("H100", SMALL, [(48, 1)] * 4),
        ("H100", MEDIUM, [(48, 1)] * 4),
    ],
    ids=["T4-small", "T4-medium", "A10-small", "A10-medium", "H100-small", "H100-medium"],
)
def test_one_to_four_workers_of_a_card(card: str, shape: ModelShape, expected: list[tuple[int, int]]) -> None:
    needs = worker_needs(shape, "fp16", BATCH)
    for count, (num_entries, max_successors) in enumerate(expected, 1):
        division = divide(CARDS[card], [needs] * count)
        assert division is not None
        assert (division.num_entries, division.max_successors) == (num_entries, max_successors)


@pytest.mark.parametrize("card", CARDS)
def test_no_order_of_events_exceeds_the_card(card: str) -> None:
    """Starts, crashes and reloads of random mixes of models, as the master permits them."""
    rng = random.Random(card)
    num_reloads = 0
    for _ in range(300):
        batch = rng.choice([1, 2, 16, 48, 96])
        dtype = rng.choice(["fp16", "fp32"])
        shapes = rng.choices([SMALL, MEDIUM], k=rng.randint(1, 6))
        needs = [worker_needs(shape, dtype, batch) for shape in shapes]
        if (division := divide(CARDS[card], needs)) is None:
            assert needed_bytes([need.memory(1) for need in needs], 0) > usable_bytes(CARDS[card])
            continue
        assert 1 <= division.num_entries <= batch
        slots = [need.memory(division.num_entries) for need in needs]
        running = [0] * len(slots)  # processes of each slot
        for _ in range(40):
            slot = rng.randrange(len(slots))
            if running[slot] and rng.random() < 0.5:  # one of the slot's processes ends
                running[slot] -= 1
            elif not running[slot]:
                running[slot] = 1
            elif sum(max(0, number - 1) for number in running) < division.max_successors:
                running[slot] += 1
                num_reloads += 1
            used = sum(number * each.total_bytes for number, each in zip(running, slots, strict=True))
            assert used <= usable_bytes(CARDS[card])
    assert num_reloads > 100


def test_full_batches_come_before_reloads_without_an_interruption() -> None:
    needs = worker_needs(MEDIUM, "fp16", BATCH)
    assert needs.least_entries == 16
    both = needed_bytes([needs.memory(16)] * 2, 1)
    just_enough = next(size for size in range(both, 2 * both, 1000) if usable_bytes(size) >= both)
    enough, too_little = divide(just_enough, [needs] * 2), divide(just_enough - 2000, [needs] * 2)
    assert enough is not None
    assert too_little is not None
    assert (enough.num_entries, enough.max_successors) == (16, 1)
    assert too_little.max_successors == 0
    assert too_little.num_entries > 16


def test_what_does_not_fit_is_none() -> None:
    needs = worker_needs(MEDIUM, "fp32", 512)
    assert divide(CARDS["T4"], [needs]) is None
    fits = [number for number in range(1, 5) if divide(CARDS["H100"], [needs] * number) is not None]
    assert fits == [1, 2]
    assert [largest(64, lambda number, most=most: number <= most) for most in (0, 2, 64)] == [0, 2, 64]  # type: ignore[misc]


def test_a_sum_counts_the_largest_worker_twice() -> None:
    slots = [SlotMemory(1, 2, 3), SlotMemory(10, 20, 30)]
    assert [needed_bytes(slots, number) for number in (0, 1)] == [66, 126]
