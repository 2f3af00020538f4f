"""The prefix cache: which tokens' keys and values the device keeps, and where a prompt finds its longest prefix.

Entries hold prompts, KV suffixes hold what sequences added to them; both stay after their sequences have ended, until
the memory is needed. Each belongs to the scope of the request that wrote it: a prompt finds prefixes of its own scope
only, so that the number of cached tokens, and the time that they save, reveal nothing about another scope. Eviction is
global. A step computes the range of suffixes from the first to the last in use, so suffixes in use are kept close
together; while none is in use, new sequences take those that were used longest ago.

Plain Python: plans copies, never makes them. Does not know tensors, the device, and when a prompt is prefilled: the
scheduler does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from workers.engine.batch import (
    BatchRow,
    Copy,
    EntryCopy,
    EntryRelease,
    PrefixCacheEntry,
    SuffixCopy,
    SuffixMove,
)
from workers.engine.request import CacheScope

# A shorter common prefix is computed again rather than copied to another entry.
MIN_COPY_TOKENS = 16
# Memory is counted in multiples of this many tokens: in 16 bits, a page of 4 KiB holds the keys of 32 in a head of 64.
PAGE_TOKENS = 32
# Unused suffixes within the range that are computed for nothing, before moving one costs less.
MAX_GAPS = 8


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached prefix of a prompt: in an entry, or in an entry and a KV suffix that continues it.

    Attributes:
        length: tokens of the prefix; 0 if there is none.
        num_in_entry: number of these tokens that are in the entry.
    """

    length: int
    entry: PrefixCacheEntry | None = None
    suffix: int | None = None
    num_in_entry: int = 0


class PrefixCache:
    """The entries and KV suffixes of a device."""

    def __init__(self, num_entries: int, max_sequences: int, max_entry_tokens: int | None = None) -> None:
        """
        Args:
            max_sequences: KV suffixes; each running sequence needs one.
            max_entry_tokens: tokens for which all entries together may take memory; the longest prompt at least. None
                where they have it from the start. Only running sequences that outgrow their suffix may exceed it.
        """
        self._max_entry_tokens = max_entry_tokens
        self._entries = [PrefixCacheEntry(index) for index in range(num_entries)]
        self.suffixes = KVSuffixPool(max_sequences)
        self._num_placements = 0

    def find(self, tokens: tuple[int, ...], scope: CacheScope) -> CachedPrefix:
        """The longest prefix of `tokens` that requests of this scope have written, if possible in an unused entry."""
        best = CachedPrefix(0)
        lengths = {}
        for entry in self._entries:
            if entry.scope != scope:
                continue
            length = lengths[entry.index] = _common_length(entry.tokens, tokens)
            is_free_equal = length == best.length > 0 and entry.is_unused and not (best.entry and best.entry.is_unused)
            if length > best.length or is_free_equal:
                best = CachedPrefix(length, entry, None, length)
        for suffix, cached in self.suffixes.cached():
            start = cached.start
            # A suffix has the scope of its entry: it is evicted before the entry gets another.
            if lengths.get(cached.entry.index, -1) >= start:
                length = start + _common_length(cached.tokens, tokens[start:])
                if length > best.length:
                    best = CachedPrefix(length, cached.entry, suffix, start)
        return best

    def place(
        self, found: CachedPrefix, tokens: tuple[int, ...], scope: CacheScope, copies: list[Copy]
    ) -> PrefixCacheEntry | None:
        """An entry that holds a prefix of `tokens` and nothing else, with memory for all of them; None if all entries
        are in use, or all memory is.

        Reuses the entry of `found` if no other sequence needs the tokens that would be overwritten, and if few are
        lost or no other entry is unused. Otherwise overwrites the least recently used entry, with a copy of `found`.

        Args:
            found: what `find` has found for these tokens in this scope.
            copies: the copies to make before the entry is used are appended.
        """
        source = found.entry
        unused = self._least_recently_used(besides=source)
        if source is not None and not source.writers and source.num_tokens_in_use() <= found.num_in_entry:
            is_small_loss = len(source.tokens) <= 2 * found.num_in_entry
            if is_small_loss or unused is None:
                if not self._allocate(source, len(tokens), copies):
                    return None
                self._truncate(source, found.num_in_entry)
                self._append_suffix(found, source, tokens, copies)
                return source
        if unused is not None:
            if not self._allocate(unused, len(tokens), copies, besides=source):
                source = None  # unless its memory is needed
                if not self._allocate(unused, len(tokens), copies):
                    return None
            self._truncate(unused, 0)
            unused.scope = scope
            if source is not None and found.length >= MIN_COPY_TOKENS:
                copies.append(EntryCopy(source.index, unused.index, found.num_in_entry))
                unused.tokens = list(tokens[: found.num_in_entry])
                self._append_suffix(found, unused, tokens, copies)
        return unused

    def mark_used(self, entry: PrefixCacheEntry) -> None:
        """Makes `entry` the most recently used."""
        self._num_placements += 1
        entry.used_at = self._num_placements

    def flush_suffix(self, row: BatchRow, copies: list[Copy]) -> bool:
        """Moves a full KV suffix into an entry, so that the row can continue; False if no entry is unused."""
        source, start = row.entry, row.start
        if source.num_tokens_in_use(besides=row) <= start:
            entry = source
            if not self._allocate(entry, row.position, copies):
                entry.num_allocated = max(entry.num_allocated, row.position)  # else sequences wait for each other
            self._truncate(entry, start)
        else:
            unused = self._least_recently_used(besides=source)
            if unused is None or not self._allocate(unused, row.position, copies, besides=source):
                return False
            entry = unused
            self._truncate(entry, 0)
            entry.scope = source.scope
            copies.append(EntryCopy(source.index, entry.index, start))
            source.readers.remove(row)
            entry.readers.append(row)
        copies.append(SuffixCopy(row.suffix, entry.index, start, row.suffix_length))
        entry.tokens = list(row.sequence.tokens(0, row.position))
        row.entry, row.start, row.suffix_length = entry, row.position, 0
        return True

    def _allocate(
        self, entry: PrefixCacheEntry, length: int, copies: list[Copy], besides: PrefixCacheEntry | None = None
    ) -> bool:
        """Counts memory for the first `length` tokens of `entry`. Where it is short, the memory of the least recently
        used entries (but `besides`) is released; False, and nothing changes, if that of all unused ones is too little.
        """
        length = -(-length // PAGE_TOKENS) * PAGE_TOKENS
        if self._max_entry_tokens is None or length <= entry.num_allocated:
            return True
        num_allocated = sum(other.num_allocated for other in self._entries)
        num_missing = num_allocated + length - entry.num_allocated - self._max_entry_tokens
        victims = []
        for other in sorted(self._entries, key=lambda other: other.used_at):
            if num_missing <= 0:
                break
            if other.num_allocated and other.is_unused and other not in (entry, besides):
                victims.append(other)
                num_missing -= other.num_allocated
        if num_missing > 0:
            return False
        for victim in victims:
            self._truncate(victim, 0)
            victim.num_allocated = 0
            copies.append(EntryRelease(victim.index))
        entry.num_allocated = length
        return True

    def _append_suffix(
        self, found: CachedPrefix, entry: PrefixCacheEntry, tokens: tuple[int, ...], copies: list[Copy]
    ) -> None:
        if found.suffix is not None:
            length = found.length - found.num_in_entry
            copies.append(SuffixCopy(found.suffix, entry.index, found.num_in_entry, length))
            entry.tokens = list(tokens[: found.length])

    def _least_recently_used(self, besides: PrefixCacheEntry | None) -> PrefixCacheEntry | None:
        unused = [entry for entry in self._entries if entry.is_unused and entry is not besides]
        return min(unused, key=lambda entry: entry.used_at, default=None)

    def _truncate(self, entry: PrefixCacheEntry, length: int) -> None:
        """Evicts all but the first `length` tokens of an entry, and the cached suffixes that continue more of it."""
        del entry.tokens[length:]
        if entry.logits_at > length:
            entry.logits_at = 0
        self.suffixes.evict(entry, length)


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


def _common_length(first: Iterable[int], second: Iterable[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
