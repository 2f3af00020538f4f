"""Which tails are whose, and what the others remember.

Plain Python. A step computes the tails from the first to the last in use in one piece, so those in
use are kept close together; as long as nothing is in use, the next sequences take the tails that
were used longest ago, so that the last suggestions stay remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workers.engine.scheduler_output import BatchRow, CachedSuffix, PrefixCacheEntry, SuffixMove

MAX_GAPS = 8  # tails computed in vain, before it pays to move one


class KVSuffixPool:
    """`max_sequences` tails, each held by a row, or remembering, or empty."""

    def __init__(self, max_sequences: int) -> None:
        self._holders: list[BatchRow | CachedSuffix | None] = [None] * max_sequences
        self._next = 0

    def take(self, rows: Sequence[BatchRow]) -> None:
        """Gives each of `rows` a tail, side by side where that can be."""
        if not rows:
            return
        for tail, row in zip(self._choose(len(rows)), rows, strict=True):
            self._holders[tail] = row
            row.tail = tail

    def give_back(self, row: BatchRow, memory: CachedSuffix | None) -> None:
        """Takes a row's tail; what it holds is remembered until the tail is used again."""
        self._holders[row.tail] = memory
        row.tail = -1

    def memories(self) -> Iterator[tuple[int, CachedSuffix]]:
        """Tails that remember."""
        for tail, holder in enumerate(self._holders):
            if isinstance(holder, CachedSuffix):
                yield tail, holder

    def forget(self, slot: PrefixCacheEntry, length: int) -> None:
        """Forgets tails of `slot` that continue more than its first `length` tokens."""
        for tail, memory in self.memories():
            if memory.slot is slot and memory.start > length:
                self._holders[tail] = None

    def close_gaps(self) -> list[SuffixMove]:
        """Moves tails that lie far apart together; the moves are to be made in their order."""
        moves: list[SuffixMove] = []
        while True:
            used = self._used()
            if not used or used[-1] - used[0] + 1 - len(used) <= max(MAX_GAPS, len(used)):
                return moves
            source = used[-1]
            target = next(tail for tail in range(used[0], source) if not self._is_used(tail))
            row = self._holders[source]
            assert isinstance(row, BatchRow)
            if row.tail_length:
                moves.append(SuffixMove(source, target, row.tail_length))
            self._holders[target], self._holders[source] = row, None
            row.tail = target

    def _choose(self, number: int) -> list[int]:
        """`number` tails that no row holds."""
        used = self._used()
        size = len(self._holders)
        if not used:
            first = self._next if self._next + number <= size else 0
            self._next = first + number
            return list(range(first, first + number))
        low, high = used[0], used[-1] + 1
        for first in (*range(low, high), high, low - number):
            run = range(first, first + number)
            if first >= 0 and run.stop <= size and not any(map(self._is_used, run)):
                return list(run)
        free = [tail for tail in range(size) if not self._is_used(tail)]
        return sorted(sorted(free, key=lambda tail: max(low - tail, tail - high))[:number])

    def _used(self) -> list[int]:
        return [tail for tail in range(len(self._holders)) if self._is_used(tail)]

    def _is_used(self, tail: int) -> bool:
        return isinstance(self._holders[tail], BatchRow)
