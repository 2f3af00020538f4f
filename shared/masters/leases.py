"""Which worker holds which slot, as the master and its workers see it through memory shared across fork.

Every shared word has one writer, so no update can be lost: the master writes a slot's counts and whether the pool
stops; each worker writes the word that reports it as warm. State that only the master changes and no worker reads is
not shared; a worker has a copy of it as of its fork. This module knows ages and slots, nothing of models, sockets or
gunicorn.
"""

from __future__ import annotations

import mmap
from collections.abc import MutableSequence

# Events of a slot that are counted over all its workers. They are keys of `State.counters`.
COUNTS = ("restarts", "reloads.succeeded", "reloads.failed")
# Living workers of a slot, at most: `Generations` begins no reload while a slot has two.
MAX_GENERATIONS = 2
# This number of deaths before warm, in a row, is a failure of the slot; fewer may be somebody's signals.
MANY_FAILURES = 3


class Leases:
    """Leases slots to workers; a worker is identified by its gunicorn age, which only grows."""

    def __init__(self, num_slots: int, words: MutableSequence[int] | None = None) -> None:
        """
        Args:
            words: `num_words` words, each loaded and stored atomically. By default memory that is shared across fork,
                whose aligned 8-byte accesses are atomic.
        """
        size = self.num_words(num_slots)
        # Each slot's warm words, each slot's counts, and whether the pool stops.
        self._words = memoryview(mmap.mmap(-1, 8 * size)).cast("q") if words is None else words
        self._num_slots = num_slots
        # By age: the slot, and the index of the warm word that only the worker of this age writes.
        self._leases: dict[int, tuple[int, int]] = {}
        # Counts by slot: deaths before warm in a row, and the slot's warm ages when the last of them was counted.
        self._failures: dict[int, tuple[int, list[int]]] = {}

    @staticmethod
    def num_words(num_slots: int) -> int:
        return num_slots * (MAX_GENERATIONS + len(COUNTS)) + 1

    def lease(self, age: int, slot: int) -> None:
        """Give a slot to the worker `age`: the first holder of a free slot, else the successor of those that hold it.

        To be called in the master, before the worker is forked.
        """
        taken = {row for held, row in self._leases.values() if held == slot}
        self._leases[age] = slot, next(row for row in range(MAX_GENERATIONS) if row not in taken)

    def free(self, age: int) -> None:
        """Take back the slot of a worker whose process has ended. To be called in the master."""
        if age not in self._leases:
            return
        slot, _ = self._leases.pop(age)
        warm_ages = self._warm_ages(slot)
        has_failed = max(warm_ages) < age
        self._failures[slot] = (self._num_failures(slot, warm_ages) + 1 if has_failed else 0, warm_ages)

    def holders(self, slot: int) -> list[int]:
        """Ages that hold a slot, oldest first; in a worker, as of its fork."""
        return sorted(age for age, (held, _) in self._leases.items() if held == slot)

    def is_warm(self, slot: int, age: int) -> bool:
        """Whether the worker has reported that its model is warm."""
        return age in self._warm_ages(slot)

    def successor_is_warm(self, slot: int, age: int) -> bool:
        """Whether a newer generation of the slot has become warm."""
        return max(self._warm_ages(slot)) > age

    def mark_warm(self, slot: int, age: int) -> None:
        """Report that the model is warm. To be called in the worker `age`, which was forked after its lease."""
        _, row = self._leases[age]
        self._words[self._warm_words(slot)[row]] = age

    def mark_stopping(self) -> None:
        """Report that all workers are about to get SIGTERM because the pool stops. To be called in the master."""
        self._words[-1] = 1

    @property
    def is_stopping(self) -> bool:
        """Whether the pool stops, in contrast to a reload or the end of a single worker."""
        return bool(self._words[-1])

    def count(self, slot: int, name: str) -> None:
        """Count an event of `COUNTS`. To be called in the master."""
        self._words[self._count_words(slot)[COUNTS.index(name)]] += 1

    def counts(self, slot: int) -> dict[str, float]:
        """The slot's events since its master has started."""
        return {name: float(self._words[word]) for name, word in zip(COUNTS, self._count_words(slot), strict=True)}

    def num_failures(self, slot: int) -> int:
        """Workers of this slot that died before they were warm, in a row; in a worker, as of its fork."""
        return self._num_failures(slot, self._warm_ages(slot))

    @property
    def have_all_failed(self) -> bool:
        """Whether no worker has ever been warm, and those of each slot have died too often. For the master."""
        return all(
            max(self._warm_ages(slot)) == 0 and self.num_failures(slot) >= MANY_FAILURES
            for slot in range(self._num_slots)
        )

    def _num_failures(self, slot: int, warm_ages: list[int]) -> int:
        count, warm_ages_then = self._failures.get(slot, (0, []))
        return count if warm_ages == warm_ages_then else 0  # else a worker became warm since

    def _warm_words(self, slot: int) -> range:
        start = slot * MAX_GENERATIONS
        return range(start, start + MAX_GENERATIONS)

    def _count_words(self, slot: int) -> range:
        start = self._num_slots * MAX_GENERATIONS + slot * len(COUNTS)
        return range(start, start + len(COUNTS))

    def _warm_ages(self, slot: int) -> list[int]:
        """The slot's warm words: in each, the age of the last worker that reported through it, or 0.

        A word is reused only after its worker has ended, and ages grow, so its value never decreases.
        """
        return [self._words[word] for word in self._warm_words(slot)]
