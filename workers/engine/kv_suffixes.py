"""Which KV suffix belongs to which sequence, and what the unused ones still cache.

A step computes the range of suffixes from the first to the last in use, so suffixes in use are kept close together.
While none is in use, new sequences take those that were used longest ago, so that the latest suggestions stay cached.
Plain Python: plans moves, never makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.engine.batch import BatchRow, PrefixCacheEntry
from workers.engine.kv_copies import SuffixMove

# Unused suffixes within the range that are computed for nothing, before moving one costs less.
MAX_GAPS = 8


@dataclass(frozen=True, slots=True)
class CachedSuffix:
    """The content of a KV suffix whose sequence has ended: `tokens` after the first `start` tokens of `entry`."""

    entry: PrefixCacheEntry
    start: int
    tokens: tuple[int, ...]


class KVSuffixPool:
    """KV suffixes; each belongs to a row of the batch, or caches an ended sequence, or is empty."""

    def __init__(self, max_sequences: int) -> None:
        self._contents: list[BatchRow | CachedSuffix | None] = [None] * max_sequences
        self._next = 0

    def assign(self, rows: Sequence[BatchRow]) -> None:
        """Gives each of `rows` a suffix, adjacent ones if possible."""
        if not rows:
            return
        for suffix, row in zip(self._choose(len(rows)), rows, strict=True):
            self._contents[suffix] = row
            row.suffix = suffix

    def release(self, row: BatchRow, cached: CachedSuffix | None) -> None:
        """Takes the suffix from a row; `cached` stays available until the suffix is assigned again."""
        self._contents[row.suffix] = cached
        row.suffix = -1

    def cached(self) -> Iterator[tuple[int, CachedSuffix]]:
        """Suffixes that cache an ended sequence."""
        for suffix, content in enumerate(self._contents):
            if isinstance(content, CachedSuffix):
                yield suffix, content

    def evict(self, entry: PrefixCacheEntry, length: int) -> None:
        """Evicts cached suffixes that continue more than the first `length` tokens of `entry`."""
        for suffix, cached in self.cached():
            if cached.entry is entry and cached.start > length:
                self._contents[suffix] = None

    def close_gaps(self) -> list[SuffixMove]:
        """Moves suffixes together that are far apart. The moves must be made in their order."""
        moves: list[SuffixMove] = []
        while True:
            used = self._used()
            if not used or used[-1] - used[0] + 1 - len(used) <= max(MAX_GAPS, len(used)):
                return moves
            source = used[-1]
            target = next(suffix for suffix in range(used[0], source) if not self._is_used(suffix))
            row = self._contents[source]
            assert isinstance(row, BatchRow)
            if row.suffix_length:
                moves.append(SuffixMove(source, target, row.suffix_length))
            self._contents[target], self._contents[source] = row, None
            row.suffix = target

    def _choose(self, number: int) -> list[int]:
        """`number` suffixes that belong to no row: adjacent and near the used ones if possible."""
        used = self._used()
        size = len(self._contents)
        if not used:
            first = self._next if self._next + number <= size else 0
            self._next = first + number
            return list(range(first, first + number))
        low, high = used[0], used[-1] + 1
        for first in (*range(low, high), high, low - number):
            run = range(first, first + number)
            if first >= 0 and run.stop <= size and not any(map(self._is_used, run)):
                return list(run)
        unused = [suffix for suffix in range(size) if not self._is_used(suffix)]
        return sorted(sorted(unused, key=lambda suffix: max(low - suffix, suffix - high))[:number])

    def _used(self) -> list[int]:
        return [suffix for suffix in range(len(self._contents)) if self._is_used(suffix)]

    def _is_used(self, suffix: int) -> bool:
        return isinstance(self._contents[suffix], BatchRow)
