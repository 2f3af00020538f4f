"""Which tokens are computed in the next step, and what of the past saves computing.

Plain Python: knows sequences, entries, suffixes and counts. Refuses to know tensors and the device.

- A prompt is computed once for all who continue it: sequences with the same prompt are members of
  one `PrefillGroup`. Siblings that announce themselves as a group are waited for, for some milliseconds;
  their prompt is computed meanwhile.
- A entry remembers its tokens after its sequences have ended, and so does a suffix. A new prompt goes
  where the longest beginning of it is remembered, and only the rest is computed.
- A long prompt is computed in chunks, between the steps of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.engine.kv_suffixes import KVSuffixPool
from workers.engine.scheduler_output import (
    SUFFIX_TOKENS,
    BatchRow,
    CachedSuffix,
    Copy,
    EntryCopy,
    PrefillChunk,
    PrefillGroup,
    PrefixCacheEntry,
    SchedulerOutput,
    SuffixCopy,
)
from workers.engine.sequence import Sequence

MAX_CHUNK = 256  # prompt tokens computed in one step
MAX_CHUNK_BESIDE_ROWS = 128  # the same, when others wait for their next token
# Three requests of one gateway come within two or three milliseconds; one that comes later joins, a step behind.
MAX_SIBLING_WAIT_S = 0.003
# Fewer remembered tokens are not worth copying to another entry.
MIN_COPY = 16


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the first `length` tokens of a prompt are: in a entry, or partly in a suffix of it."""

    length: int
    entry: PrefixCacheEntry | None = None
    suffix: int | None = None
    in_entry: int = 0  # of `length`, those in the entry


class Scheduler:
    """Plans steps, and keeps the books of the cache."""

    def __init__(self, num_entries: int, max_sequences: int) -> None:
        """
        Args:
            max_sequences: how many sequences can run at once; no more may be in here.
        """
        self._slots = [PrefixCacheEntry(index) for index in range(num_entries)]
        self._suffixes = KVSuffixPool(max_sequences)
        self._waiting: list[PrefillGroup] = []
        self._computing: list[PrefillGroup] = []
        self._held: list[PrefillGroup] = []  # computed
        self._rows: list[BatchRow] = []
        self._num_started = 0

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        prompts = [*self._waiting, *self._computing, *self._held]
        running = [row.sequence for row in self._rows]
        return running + [member for prompt in prompts for member in prompt.members]

    @property
    def num_running(self) -> int:
        """Sequences that have been scheduled."""
        return len(self._rows) + sum(len(prompt.members) for prompt in (*self._computing, *self._held))

    @property
    def wake_at(self) -> float:
        """When an empty plan may be followed by another, time.monotonic() seconds."""
        return min((prompt.waits_until for prompt in self._held), default=float("inf"))

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence in, beside those with the same prompt."""
        request = sequence.request
        tokens, num_forced_ids = sequence.prompt + sequence.forced_ids, len(sequence.forced_ids)
        if not request.echo_logprobs:
            for prompt in (*self._computing, *self._held, *self._waiting):
                if (prompt.tokens, prompt.num_forced_ids, prompt.is_echoed) == (tokens, num_forced_ids, False):
                    prompt.members.append(sequence)
                    return
        self._waiting.append(
            PrefillGroup(
                tokens=tokens,
                num_forced_ids=num_forced_ids,
                members=[sequence],
                group_size=request.group[1] if request.group else 1,
                waits_until=sequence.submitted_at + MAX_SIBLING_WAIT_S,
                is_echoed=request.echo_logprobs,
            )
        )

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended; what is computed of it stays remembered."""
        for prompts in (self._waiting, self._computing, self._held):
            for prompt in prompts:
                if sequence in prompt.members:
                    prompt.members.remove(sequence)
                    if not prompt.members:
                        prompts.remove(prompt)
                        if prompt.entry is not None:
                            prompt.entry.writers.remove(prompt)
                    return
        row = next(row for row in self._rows if row.sequence is sequence)
        self._rows.remove(row)
        row.entry.readers.remove(row)
        if row.suffix >= 0:
            tokens = sequence.tokens(row.start, row.position)
            self._suffixes.give_back(row, CachedSuffix(row.entry, row.start, tokens) if tokens else None)

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step; `complete` is to follow once it has been carried out."""
        copies: list[Copy] = []
        for prompt in list(self._waiting):
            self._start(prompt, copies)
        for prompt in (*self._computing, *self._held):
            prompt.is_held = len(prompt.members) < prompt.group_size and now < prompt.waits_until
            for member in prompt.members:
                member.start(now, prompt.num_cached)
        rows = self._rows_to_step(copies)
        ready = []
        for prompt in [prompt for prompt in self._held if not prompt.is_held]:
            self._held.remove(prompt)
            ready += self._run(prompt)
        chunks = self._chunks(MAX_CHUNK_BESIDE_ROWS if rows else MAX_CHUNK)
        return SchedulerOutput(copies, rows, chunks, ready, allows_multi_step=not self._held)

    def complete(self, plan: SchedulerOutput, num_steps: int = 1) -> None:
        """Enters into the books what has been computed, so many steps of the rows; the tokens drawn are not in yet."""
        for row in plan.rows:
            row.suffix_length += num_steps
        for chunk in plan.chunks:
            prompt, entry = chunk.prompt, chunk.entry
            prompt.num_computed = chunk.stop
            entry.tokens[chunk.start : chunk.stop] = prompt.tokens[chunk.start : chunk.stop]
            if chunk.is_last:
                entry.logits_at, entry.num_logits = chunk.stop, 1 + prompt.num_forced_ids
                self._computing.remove(prompt)
                if prompt.is_held:
                    self._held.append(prompt)
                else:
                    self._run(prompt)

    def _rows_to_step(self, copies: list[Copy]) -> list[BatchRow]:
        rows = [row for row in self._rows if row.sequence.token_ids]
        copies += self._suffixes.close_gaps()
        new = [row for row in rows if row.suffix < 0]
        for row in new:
            row.start = row.sequence.num_tokens - 1  # all but the newest are in the entry, drafted ones among them
        self._suffixes.take(new)
        rows = [row for row in rows if row.suffix_length < SUFFIX_TOKENS or self._settle(row, copies)]
        return sorted(rows, key=lambda row: row.suffix)

    def _chunks(self, left: int) -> list[PrefillChunk]:
        """Up to `left` prompt tokens, oldest prompts first."""
        chunks = []
        for prompt in self._computing:
            assert prompt.entry is not None
            stop = min(len(prompt.tokens), prompt.num_computed + left)
            if prompt.first_wanted < stop < len(prompt.tokens):  # a draft is computed in one piece
                stop = prompt.first_wanted
            if stop > prompt.num_computed:
                chunks.append(PrefillChunk(prompt, prompt.entry, prompt.num_computed, stop))
                left -= stop - prompt.num_computed
        return chunks

    def _run(self, prompt: PrefillGroup) -> list[BatchRow]:
        """Makes rows of the members of a prompt that has been computed."""
        entry = prompt.entry
        assert entry is not None
        entry.writers.remove(prompt)
        rows = [BatchRow(member, entry, len(prompt.tokens)) for member in prompt.members]
        entry.readers += rows
        self._rows += rows
        return rows

    def _start(self, prompt: PrefillGroup, copies: list[Copy]) -> None:
        """Finds a entry for `prompt`, if there is one."""
        tokens = prompt.tokens
        found = _Found(0) if prompt.is_echoed else self._find(tokens)
        whole = found.entry if found.in_entry == len(tokens) else None
        if whole is not None and whole.writers:
            whole = None  # a entry keeps the logits of one place: those that its writers draw from
        is_ready = whole is not None and whole.logits_at == len(tokens) and whole.num_logits > prompt.num_forced_ids
        entry = self._place(found, tokens, copies) if whole is None else whole
        if entry is None:
            return
        self._num_started += 1
        entry.used_at = self._num_started
        self._waiting.remove(prompt)
        entry.writers.append(prompt)
        prompt.entry = entry
        if is_ready:
            prompt.num_cached = len(tokens) - prompt.num_forced_ids
            self._held.append(prompt)
            return
        self._computing.append(prompt)
        # Without its logits the last token is computed again; that stores what is there already.
        remembered = len(entry.tokens) if whole is None else len(tokens)
        prompt.num_cached = prompt.num_computed = min(remembered, prompt.first_wanted)

    def _find(self, tokens: tuple[int, ...]) -> _Found:
        """The longest beginning of `tokens` that is remembered."""
        best = _Found(0)
        lengths = {}
        for entry in self._slots:
            length = lengths[entry.index] = _common_length(entry.tokens, tokens)
            if length > best.length:
                best = _Found(length, entry, None, length)
        for suffix, memory in self._suffixes.memories():
            start = memory.start
            if lengths[memory.entry.index] >= start:
                length = start + _common_length(memory.tokens, tokens[start:])
                if length > best.length:
                    best = _Found(length, memory.entry, suffix, start)
        return best

    def _place(self, found: _Found, tokens: tuple[int, ...], copies: list[Copy]) -> PrefixCacheEntry | None:
        """A entry whose tokens are the beginning of `tokens`; None if all entries are in use."""
        source = found.entry
        free = self._free_entry(besides=source)
        if source is not None and not source.writers and source.num_relied_on() <= found.in_entry:
            is_small_loss = len(source.tokens) <= 2 * found.in_entry
            if is_small_loss or free is None:
                self._truncate(source, found.in_entry)
                self._append_suffix(found, source, tokens, copies)
                return source
        if free is not None:
            self._truncate(free, 0)
            if source is not None and found.length >= MIN_COPY:
                copies.append(EntryCopy(source.index, free.index, found.in_entry))
                free.tokens = list(tokens[: found.in_entry])
                self._append_suffix(found, free, tokens, copies)
        return free

    def _append_suffix(
        self, found: _Found, entry: PrefixCacheEntry, tokens: tuple[int, ...], copies: list[Copy]
    ) -> None:
        if found.suffix is not None:
            length = found.length - found.in_entry
            copies.append(SuffixCopy(found.suffix, entry.index, found.in_entry, length))
            entry.tokens = list(tokens[: found.length])

    def _settle(self, row: BatchRow, copies: list[Copy]) -> bool:
        """Empties a full suffix into a entry; False if that has to wait for one."""
        source, start = row.entry, row.start
        if source.num_relied_on(besides=row) <= start:
            entry = source
            self._truncate(entry, start)
        else:
            free = self._free_entry(besides=source)
            if free is None:
                return False
            entry = free
            self._truncate(entry, 0)
            copies.append(EntryCopy(source.index, entry.index, start))
            source.readers.remove(row)
            entry.readers.append(row)
        copies.append(SuffixCopy(row.suffix, entry.index, start, row.suffix_length))
        entry.tokens = list(row.sequence.tokens(0, row.position))
        row.entry, row.start, row.suffix_length = entry, row.position, 0
        return True

    def _free_entry(self, besides: PrefixCacheEntry | None) -> PrefixCacheEntry | None:
        """The entry used longest ago that nobody needs."""
        free = [entry for entry in self._slots if entry.is_free and entry is not besides]
        return min(free, key=lambda entry: entry.used_at, default=None)

    def _truncate(self, entry: PrefixCacheEntry, length: int) -> None:
        """Forgets all but a entry's first `length` tokens."""
        del entry.tokens[length:]
        if entry.logits_at > length:
            entry.logits_at = 0
        self._suffixes.forget(entry, length)


def _common_length(ours: Iterable[int], theirs: Iterable[int]) -> int:
    """Tokens that two sequences have in common from their beginning."""
    length = 0
    for own, other in zip(ours, theirs, strict=False):
        if own != other:
            break
        length += 1
    return length
