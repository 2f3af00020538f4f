"""Which suffixes are whose, and what the others remember.

Plain Python. A step computes the suffixes from the first to the last in use in one piece, so those in
use are kept close together; as long as nothing is in use, the next sequences take the suffixes that
were used longest ago, so that the last suggestions stay remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from workers.engine.scheduler_output import BatchRow, CachedSuffix, PrefixCacheEntry, SuffixMove

MAX_GAPS = 8  # suffixes computed in vain, before it pays to move one


class KVSuffixPool:
    """`max_sequences` suffixes, each held by a row, or remembering, or empty."""

    def __init__(self, max_sequences: int) -> None:
        self._holders: list[BatchRow | CachedSuffix | None] = [None] * max_sequences
        self._next = 0

    def take(self, rows: Sequence[BatchRow]) -> None:
        """Gives each of `rows` a suffix, side by side where that can be."""
        if not rows:
            return
        for suffix, row in zip(self._choose(len(rows)), rows, strict=True):
            self._holders[suffix] = row
            row.suffix = suffix

    def give_back(self, row: BatchRow, memory: CachedSuffix | None) -> None:
        """Takes a row's suffix; what it holds is remembered until the suffix is used again."""
        self._holders[row.suffix] = memory
        row.suffix = -1

    def memories(self) -> Iterator[tuple[int, CachedSuffix]]:
        """Suffixes that remember."""
        for suffix, holder in enumerate(self._holders):
            if isinstance(holder, CachedSuffix):
                yield suffix, holder

    def forget(self, entry: PrefixCacheEntry, length: int) -> None:
        """Forgets suffixes of `entry` that continue more than its first `length` tokens."""
        for suffix, memory in self.memories():
            if memory.entry is entry and memory.start > length:
                self._holders[suffix] = None

    def close_gaps(self) -> list[SuffixMove]:
        """Moves suffixes that lie far apart together; the moves are to be made in their order."""
        moves: list[SuffixMove] = []
        while True:
            used = self._used()
            if not used or used[-1] - used[0] + 1 - len(used) <= max(MAX_GAPS, len(used)):
                return moves
            source = used[-1]
            target = next(suffix for suffix in range(used[0], source) if not self._is_used(suffix))
            row = self._holders[source]
            assert isinstance(row, BatchRow)
            if row.suffix_length:
                moves.append(SuffixMove(source, target, row.suffix_length))
            self._holders[target], self._holders[source] = row, None
            row.suffix = target

    def _choose(self, number: int) -> list[int]:
        """`number` suffixes that no row holds."""
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
        free = [suffix for suffix in range(size) if not self._is_used(suffix)]
        return sorted(sorted(free, key=lambda suffix: max(low - suffix, suffix - high))[:number])

    def _used(self) -> list[int]:
        return [suffix for suffix in range(len(self._holders)) if self._is_used(suffix)]

    def _is_used(self, suffix: int) -> bool:
        return isinstance(self._holders[suffix], BatchRow)
