"""Which tokens are computed in the next step, and what of the past saves computing.

Plain Python: knows sequences, slots, tails and counts. Refuses to know tensors and the device.

- A prompt is computed once for all who continue it: sequences with the same prompt are members of
  one `PrefillGroup`. Siblings that announce themselves as a group are waited for, for some milliseconds;
  their prompt is computed meanwhile.
- A slot remembers its tokens after its sequences have ended, and so does a tail. A new prompt goes
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
# Fewer remembered tokens are not worth copying to another slot.
MIN_COPY = 16


@dataclass(frozen=True, slots=True)
class _Found:
    """Where the first `length` tokens of a prompt are: in a slot, or partly in a tail of it."""

    length: int
    slot: PrefixCacheEntry | None = None
    tail: int | None = None
    in_slot: int = 0  # of `length`, those in the slot


class Scheduler:
    """Plans steps, and keeps the books of the cache."""

    def __init__(self, num_entries: int, max_sequences: int) -> None:
        """
        Args:
            max_sequences: how many sequences can run at once; no more may be in here.
        """
        self._slots = [PrefixCacheEntry(index) for index in range(num_entries)]
        self._tails = KVSuffixPool(max_sequences)
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
        tokens, num_drafted = sequence.prompt + sequence.draft, len(sequence.draft)
        if not request.echo_logprobs:
            for prompt in (*self._computing, *self._held, *self._waiting):
                if (prompt.tokens, prompt.num_drafted, prompt.is_echoed) == (tokens, num_drafted, False):
                    prompt.members.append(sequence)
                    return
        self._waiting.append(
            PrefillGroup(
                tokens=tokens,
                num_drafted=num_drafted,
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
                        if prompt.slot is not None:
                            prompt.slot.writers.remove(prompt)
                    return
        row = next(row for row in self._rows if row.sequence is sequence)
        self._rows.remove(row)
        row.slot.readers.remove(row)
        if row.tail >= 0:
            tokens = sequence.tokens(row.start, row.position)
            self._tails.give_back(row, CachedSuffix(row.slot, row.start, tokens) if tokens else None)

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
            row.tail_length += num_steps
        for chunk in plan.chunks:
            prompt, slot = chunk.prompt, chunk.slot
            prompt.num_computed = chunk.stop
            slot.tokens[chunk.start : chunk.stop] = prompt.tokens[chunk.start : chunk.stop]
            if chunk.is_last:
                slot.logits_at, slot.num_logits = chunk.stop, 1 + prompt.num_drafted
                self._computing.remove(prompt)
                if prompt.is_held:
                    self._held.append(prompt)
                else:
                    self._run(prompt)

    def _rows_to_step(self, copies: list[Copy]) -> list[BatchRow]:
        rows = [row for row in self._rows if row.sequence.token_ids]
        copies += self._tails.close_gaps()
        new = [row for row in rows if row.tail < 0]
        for row in new:
            row.start = row.sequence.num_tokens - 1  # all but the newest are in the slot, drafted ones among them
        self._tails.take(new)
        rows = [row for row in rows if row.tail_length < SUFFIX_TOKENS or self._settle(row, copies)]
        return sorted(rows, key=lambda row: row.tail)

    def _chunks(self, left: int) -> list[PrefillChunk]:
        """Up to `left` prompt tokens, oldest prompts first."""
        chunks = []
        for prompt in self._computing:
            assert prompt.slot is not None
            stop = min(len(prompt.tokens), prompt.num_computed + left)
            if prompt.first_wanted < stop < len(prompt.tokens):  # a draft is computed in one piece
                stop = prompt.first_wanted
            if stop > prompt.num_computed:
                chunks.append(PrefillChunk(prompt, prompt.slot, prompt.num_computed, stop))
                left -= stop - prompt.num_computed
        return chunks

    def _run(self, prompt: PrefillGroup) -> list[BatchRow]:
        """Makes rows of the members of a prompt that has been computed."""
        slot = prompt.slot
        assert slot is not None
        slot.writers.remove(prompt)
        rows = [BatchRow(member, slot, len(prompt.tokens)) for member in prompt.members]
        slot.readers += rows
        self._rows += rows
        return rows

    def _start(self, prompt: PrefillGroup, copies: list[Copy]) -> None:
        """Finds a slot for `prompt`, if there is one."""
        tokens = prompt.tokens
        found = _Found(0) if prompt.is_echoed else self._find(tokens)
        whole = found.slot if found.in_slot == len(tokens) else None
        if whole is not None and whole.writers:
            whole = None  # a slot keeps the logits of one place: those that its writers draw from
        is_ready = whole is not None and whole.logits_at == len(tokens) and whole.num_logits > prompt.num_drafted
        slot = self._place(found, tokens, copies) if whole is None else whole
        if slot is None:
            return
        self._num_started += 1
        slot.used_at = self._num_started
        self._waiting.remove(prompt)
        slot.writers.append(prompt)
        prompt.slot = slot
        if is_ready:
            prompt.num_cached = len(tokens) - prompt.num_drafted
            self._held.append(prompt)
            return
        self._computing.append(prompt)
        # Without its logits the last token is computed again; that stores what is there already.
        remembered = len(slot.tokens) if whole is None else len(tokens)
        prompt.num_cached = prompt.num_computed = min(remembered, prompt.first_wanted)

    def _find(self, tokens: tuple[int, ...]) -> _Found:
        """The longest beginning of `tokens` that is remembered."""
        best = _Found(0)
        lengths = {}
        for slot in self._slots:
            length = lengths[slot.index] = _common_length(slot.tokens, tokens)
            if length > best.length:
                best = _Found(length, slot, None, length)
        for tail, memory in self._tails.memories():
            start = memory.start
            if lengths[memory.slot.index] >= start:
                length = start + _common_length(memory.tokens, tokens[start:])
                if length > best.length:
                    best = _Found(length, memory.slot, tail, start)
        return best

    def _place(self, found: _Found, tokens: tuple[int, ...], copies: list[Copy]) -> PrefixCacheEntry | None:
        """A slot whose tokens are the beginning of `tokens`; None if all slots are in use."""
        source = found.slot
        free = self._free_slot(besides=source)
        if source is not None and not source.writers and source.num_relied_on() <= found.in_slot:
            is_small_loss = len(source.tokens) <= 2 * found.in_slot
            if is_small_loss or free is None:
                self._truncate(source, found.in_slot)
                self._append_tail(found, source, tokens, copies)
                return source
        if free is not None:
            self._truncate(free, 0)
            if source is not None and found.length >= MIN_COPY:
                copies.append(EntryCopy(source.index, free.index, found.in_slot))
                free.tokens = list(tokens[: found.in_slot])
                self._append_tail(found, free, tokens, copies)
        return free

    def _append_tail(self, found: _Found, slot: PrefixCacheEntry, tokens: tuple[int, ...], copies: list[Copy]) -> None:
        if found.tail is not None:
            length = found.length - found.in_slot
            copies.append(SuffixCopy(found.tail, slot.index, found.in_slot, length))
            slot.tokens = list(tokens[: found.length])

    def _settle(self, row: BatchRow, copies: list[Copy]) -> bool:
        """Empties a full tail into a slot; False if that has to wait for one."""
        source, start = row.slot, row.start
        if source.num_relied_on(besides=row) <= start:
            slot = source
            self._truncate(slot, start)
        else:
            free = self._free_slot(besides=source)
            if free is None:
                return False
            slot = free
            self._truncate(slot, 0)
            copies.append(EntryCopy(source.index, slot.index, start))
            source.readers.remove(row)
            slot.readers.append(row)
        copies.append(SuffixCopy(row.tail, slot.index, start, row.tail_length))
        slot.tokens = list(row.sequence.tokens(0, row.position))
        row.slot, row.start, row.tail_length = slot, row.position, 0
        return True

    def _free_slot(self, besides: PrefixCacheEntry | None) -> PrefixCacheEntry | None:
        """The slot used longest ago that nobody needs."""
        free = [slot for slot in self._slots if slot.is_free and slot is not besides]
        return min(free, key=lambda slot: slot.used_at, default=None)

    def _truncate(self, slot: PrefixCacheEntry, length: int) -> None:
        """Forgets all but a slot's first `length` tokens."""
        del slot.tokens[length:]
        if slot.logits_at > length:
            slot.logits_at = 0
        self._tails.forget(slot, length)


def _common_length(ours: Iterable[int], theirs: Iterable[int]) -> int:
    """Tokens that two sequences have in common from their beginning."""
    length = 0
    for own, other in zip(ours, theirs, strict=False):
        if own != other:
            break
        length += 1
    return length
