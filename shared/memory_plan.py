"""Divides the memory of a GPU among its workers, before any of them starts.

Arithmetic only: knows the sizes of models and cards, and no driver, no CUDA and no tensor library. What a worker
allocates follows from the plan, not from what was free when it started, so it does not depend on the order of starts.

A worker needs

    weights   numbers of the checkpoint and of its head · bytes of a number
    suffixes  (max_batch · tokens of a KV suffix + 1 dummy slot) · bytes of a token
    entries   num_entries · n_ctx · bytes of a token, from 1 to max_batch prefix-cache entries
    other     PROCESS_BYTES + LOGITS_COPIES · max_batch · vocab · 4

where a token's keys and values take layers · 2 · width of its keys numbers. The head is counted as a matrix of its own:
a checkpoint may have one, and the runner may keep a padded copy.

All workers of a GPU get the same number of entries, the largest with

    Σ workers + largest worker ≤ (1 − RESERVE_SHARE) · memory      a successor loads while its predecessor serves
    Σ workers                  ≤ (1 − RESERVE_SHARE) · memory      a worker is stopped before its successor loads

The second bound is used where the first leaves too few entries for a full batch of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

# Positions of a KV suffix: with the last position of the prompt, a whole number of the attention kernel's blocks.
SUFFIX_TOKENS = 255
# CUDA context, modules, captured graphs and workspaces of one process: 956 MiB on an H200 (docs/GPU.md).
PROCESS_BYTES = 1 << 30
# float32 arrays [max_batch, vocab] that first tokens, graphs and sampling keep. An estimate: not yet measured.
LOGITS_COPIES = 5
# Share of a card for what its driver keeps (3 % of a T4), temporary arrays, and fragmentation (an estimate).
RESERVE_SHARE = 0.1
# Branches of a request, which share the prefix-cache entry of their prompt.
BRANCHES_PER_REQUEST = 3


class SlotMemory(msgspec.Struct, frozen=True):
    """What the worker of a slot may allocate on its GPU."""

    weight_bytes: int
    cache_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.other_bytes


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of the plan. `max_successors`: workers that may load while their predecessors serve.

    `memory_bytes` is None if the driver does not report it; the workers then get the least that serves full batches.
    """

    device: str
    name: str
    memory_bytes: int | None
    max_successors: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that determine its memory.

    Attributes:
        kv_width: numbers in a token's keys, of one layer.
        num_weights: with a head of its own.
    """

    n_layer: int
    kv_width: int
    n_ctx: int
    vocab_size: int
    num_weights: int


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """The memory of a worker as a function of its prefix-cache entries."""

    weight_bytes: int
    suffix_bytes: int
    entry_bytes: int
    other_bytes: int
    max_batch: int

    @property
    def least_entries(self) -> int:
        """Entries with which requests of BRANCHES_PER_REQUEST branches fill the batch."""
        return -(-self.max_batch // BRANCHES_PER_REQUEST)

    def memory(self, num_entries: int) -> SlotMemory:
        return SlotMemory(self.weight_bytes, self.suffix_bytes + num_entries * self.entry_bytes, self.other_bytes)


@dataclass(frozen=True, slots=True)
class Division:
    """How a GPU is divided: entries of each worker, and workers that may load while their predecessors serve."""

    num_entries: int
    max_successors: int


def worker_needs(shape: ModelShape, dtype: str, max_batch: int, suffix_tokens: int = SUFFIX_TOKENS) -> WorkerNeeds:
    """
    Args:
        dtype: "fp32", or any other for one of 16 bits, as a GPU has no int8.
        suffix_tokens: tokens of one KV suffix.
    """
    number_bytes = 4 if dtype == "fp32" else 2
    token_bytes = shape.n_layer * 2 * shape.kv_width * number_bytes
    return WorkerNeeds(
        weight_bytes=shape.num_weights * number_bytes,
        suffix_bytes=(max_batch * suffix_tokens + 1) * token_bytes,
        entry_bytes=shape.n_ctx * token_bytes,
        other_bytes=PROCESS_BYTES + LOGITS_COPIES * max_batch * shape.vocab_size * 4,
        max_batch=max_batch,
    )


def cpu_cache_limits(shape: ModelShape, dtype: str, max_batch: int) -> tuple[int, int]:
    """The least and the most bytes that a KV cache on a CPU can use: with one prefix-cache entry, and with one for each
    sequence. Keys and values are kept in 16 bits unless `dtype` is "fp32"; tokens are allocated in blocks of 16."""
    needs = worker_needs(shape, dtype, max_batch, -(-SUFFIX_TOKENS // 16) * 16)
    return needs.memory(1).cache_bytes, needs.memory(max_batch).cache_bytes


def usable_bytes(memory_bytes: int) -> int:
    """Return what a card's workers may allocate together."""
    return int((1 - RESERVE_SHARE) * memory_bytes)


def divide(memory_bytes: int, workers: Sequence[WorkerNeeds]) -> Division | None:
    """The division of a card among `workers`, which have the same `max_batch`; None if they do not fit."""
    usable = usable_bytes(memory_bytes)
    for max_successors in (1, 0):
        least = workers[0].least_entries if max_successors else 1
        for num_entries in range(workers[0].max_batch, least - 1, -1):
            if needed_bytes([worker.memory(num_entries) for worker in workers], max_successors) <= usable:
                return Division(num_entries, max_successors)
    return None


def needed_bytes(slots: Sequence[SlotMemory], max_successors: int) -> int:
    """What the workers of a GPU take together, with as many successors of the largest of them."""
    totals = [slot.total_bytes for slot in slots]
    return sum(totals) + max_successors * max(totals)


def largest(limit: int, does_fit: Callable[[int], bool]) -> int:
    """The largest number up to `limit` that fits, if all smaller ones fit too; 0 if none does."""
    return next((number for number in range(limit, 0, -1) if does_fit(number)), 0)
