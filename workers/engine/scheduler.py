"""What the next step computes: continuous batching, chunked prefill, and one prefill for siblings.

- Each step decodes a token of every running sequence and prefills a chunk of waiting prompts: a long prompt is computed
  between the decode steps of others.
- Sequences with the same prompt and cache scope share a `PrefillGroup`. If more siblings are announced, the group waits
  for them for some milliseconds while its prompt is computed.
- A prompt starts from its longest prefix in the `PrefixCache`; only the rest is computed.

Plain Python. Does not know tensors, the device and text.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial

from shared.memory_plan import SUFFIX_TOKENS
from workers.engine.batch import BatchRow, Copy, PrefillChunk, PrefillGroup, SchedulerOutput
from workers.engine.prefix_cache import CachedSuffix, PrefixCache
from workers.engine.sequence import Sequence

MAX_CHUNK = 256  # prompt tokens prefilled in one step
# The same while running sequences wait for their next token: on a GPU what its programs compute together, on a CPU
# less, because the time of a step grows with each token.
MAX_CHUNK_WITH_ROWS = 128
MAX_CPU_CHUNK_WITH_ROWS = 32
# Three requests of one gateway arrive within two or three milliseconds. A later one joins the group a step behind.
MAX_SIBLING_WAIT_S = 0.003
# Prompts that are prefilled at the same time to score their ends. Each takes an entry, which others lose; the next ones
# use the same entries again.
MAX_SCORED_AT_ONCE = 4


class Scheduler:
    """Schedules steps. Sequences enter by `add`, and stay until `remove`."""

    def __init__(
        self,
        num_entries: int,
        max_sequences: int,
        *,
        max_chunk: int = MAX_CHUNK,
        max_chunk_with_rows: int = MAX_CHUNK_WITH_ROWS,
        max_entry_tokens: int | None = None,
    ) -> None:
        """
        Args:
            num_entries: prefix-cache entries of the device.
            max_sequences: sequences that can run at once; further ones wait after their first token.
            max_chunk: prompt tokens prefilled in one step.
            max_chunk_with_rows: the same while sequences run.
            max_entry_tokens: as in `PrefixCache`.
        """
        self._make_cache = partial(PrefixCache, num_entries, max_sequences, max_entry_tokens)
        self._max_sequences = max_sequences
        self._cache = self._make_cache()
        self._max_chunk = max_chunk
        self._max_chunk_with_rows = min(max_chunk, max_chunk_with_rows)
        self._waiting: list[PrefillGroup] = []  # for an entry
        self._prefilling: list[PrefillGroup] = []
        self._prefilled: list[PrefillGroup] = []  # waiting for siblings
        self._rows: list[BatchRow] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not ended."""
        groups = [*self._waiting, *self._prefilling, *self._prefilled]
        running = [row.sequence for row in self._rows]
        return running + [member for group in groups for member in group.sequences]

    @property
    def scheduled(self) -> list[Sequence]:
        """Those that a step may have computed: all but the ones that wait for an entry."""
        prompts = [member for group in (*self._prefilling, *self._prefilled) for member in group.sequences]
        return [row.sequence for row in self._rows] + prompts

    @property
    def num_running(self) -> int:
        """Sequences that have been scheduled."""
        return len(self._rows) + sum(len(group.sequences) for group in (*self._prefilling, *self._prefilled))

    @property
    def wake_at(self) -> float:
        """When an empty step may be followed by another that is not, in `time.monotonic()` seconds."""
        return min((group.sibling_deadline for group in self._prefilled), default=float("inf"))

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence; it joins the group that has the same prompt and scope, if there is one."""
        request = sequence.request
        tokens, num_forced_ids = sequence.prompt + sequence.forced_ids, len(sequence.forced_ids)
        if not request.echo_logprobs:
            key = tokens, num_forced_ids, request.cache_scope, False
            for group in (*self._prefilling, *self._prefilled, *self._waiting):
                if (group.tokens, group.num_forced_ids, group.scope, group.is_echoed) == key:
                    group.sequences.append(sequence)
                    return
        self._waiting.append(
            PrefillGroup(
                tokens=tokens,
                num_forced_ids=num_forced_ids,
                sequences=[sequence],
                scope=request.cache_scope,
                group_size=1 if request.echo_logprobs else request.group_size,  # no sibling joins it
                sibling_deadline=sequence.submitted_at + MAX_SIBLING_WAIT_S,
                is_echoed=request.echo_logprobs,
                echo_from=request.echo_from if request.echo_logprobs else 0,
            )
        )

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended; its keys and values stay cached."""
        for groups in (self._waiting, self._prefilling, self._prefilled):
            for group in groups:
                if sequence in group.sequences:
                    group.sequences.remove(sequence)
                    if not group.sequences:
                        groups.remove(group)
                        if group.entry is not None:
                            group.entry.writers.remove(group)
                    return
        row = next(row for row in self._rows if row.sequence is sequence)
        self._rows.remove(row)
        row.entry.readers.remove(row)
        if row.suffix >= 0:
            tokens = sequence.tokens(row.start, row.position)
            self._cache.suffixes.release(row, CachedSuffix(row.entry, row.start, tokens) if tokens else None)

    def clear_cache(self) -> None:
        """Forgets everything cached. To be called while no sequence is scheduled."""
        assert not self.scheduled
        self._cache = self._make_cache()

    def schedule(self, now: float) -> SchedulerOutput:
        """Schedule the next step; once it is computed, `complete` must follow.

        Args:
            now: `time.monotonic()` seconds.
        """
        copies: list[Copy] = []
        for group in list(self._waiting):
            self._start_prefill(group, copies)
        for group in (*self._prefilling, *self._prefilled):
            group.awaits_siblings = len(group.sequences) < group.group_size and now < group.sibling_deadline
            for member in group.sequences:
                member.start(now, group.num_cached)
        rows = self._schedule_rows(copies)
        ready = []
        for group in [group for group in self._prefilled if not group.awaits_siblings]:
            self._prefilled.remove(group)
            ready += self._start_rows(group)
        chunks = self._schedule_chunks(self._max_chunk_with_rows if rows else self._max_chunk)
        return SchedulerOutput(copies, rows, chunks, ready, allows_multi_step=not self._prefilled)

    def complete(self, scheduled: SchedulerOutput, num_steps: int = 1, failed: Items[Sequence] = ()) -> None:
        """Records that a step has been computed; called before its tokens are appended to their sequences.

        Args:
            num_steps: decode steps computed for the rows.
            failed: sequences without a result, which the caller removes next. A chunk that was computed for none but
                them is not recorded.
        """
        for row in scheduled.rows:
            row.suffix_length += num_steps
        for chunk in scheduled.chunks:
            group, entry = chunk.group, chunk.entry
            if all(member in failed for member in group.sequences):
                continue
            group.num_computed = chunk.stop
            entry.tokens[chunk.start : chunk.stop] = group.tokens[chunk.start : chunk.stop]
            if chunk.is_last:
                entry.logits_at, entry.num_logits = chunk.stop, 1 + group.num_forced_ids
                self._prefilling.remove(group)
                if group.awaits_siblings:
                    self._prefilled.append(group)
                else:
                    self._start_rows(group)

    def _start_prefill(self, group: PrefillGroup, copies: list[Copy]) -> None:
        """Gives a waiting group an entry, if one is unused or has its prompt."""
        tokens = group.tokens
        if group.echo_from and sum(other.echo_from > 0 for other in self._prefilling) >= MAX_SCORED_AT_ONCE:
            return
        found = self._cache.find(tokens[: group.num_cacheable], group.scope)
        whole = found.entry if found.num_in_entry == len(tokens) else None
        if whole is not None and whole.writers:
            whole = None  # an entry keeps the logits of one position, which its writers draw from
        has_logits = whole is not None and whole.has_logits(len(tokens), 1 + group.num_forced_ids)
        entry = self._cache.place(found, tokens, group.scope, copies) if whole is None else whole
        if entry is None:
            return
        self._cache.mark_used(entry)
        self._waiting.remove(group)
        entry.writers.append(group)
        group.entry = entry
        if has_logits:
            group.num_cached = len(tokens) - group.num_forced_ids
            self._prefilled.append(group)
            return
        self._prefilling.append(group)
        # If its logits are not kept, the last token is computed again, which stores the same keys and values.
        num_cached = len(entry.tokens) if whole is None else len(tokens)
        group.num_cached = group.num_computed = min(num_cached, group.first_logits_at)

    def _schedule_rows(self, copies: list[Copy]) -> list[BatchRow]:
        """The rows that can decode in this step, each with a KV suffix that has room."""
        rows = [row for row in self._rows if row.sequence.token_ids]
        copies += self._cache.suffixes.close_gaps()
        num_free = self._max_sequences - sum(row.suffix >= 0 for row in rows)
        new = [row for row in rows if row.suffix < 0][:num_free]
        for row in new:
            row.start = row.sequence.num_tokens - 1  # the entry has all but the newest, drawn forced ids included
        self._cache.suffixes.assign(new)
        rows = [row for row in rows if row.suffix >= 0]
        rows = [row for row in rows if row.suffix_length < SUFFIX_TOKENS or self._cache.flush_suffix(row, copies)]
        return sorted(rows, key=lambda row: row.suffix)

    def _schedule_chunks(self, max_tokens: int) -> list[PrefillChunk]:
        """Up to `max_tokens` prompt tokens: of the groups with the fewest left to compute, older ones first among
        equals. Half of them are the oldest group's, so that short prompts do not hold up a long one without end.

        The shortest remaining time first has the shortest mean wait: L. Schrage, "A proof of the optimality of the
        shortest remaining processing time discipline", Operations Research 16 (1968).
        """
        chunks = []
        oldest = self._prefilling[0] if self._prefilling else None
        num_reserved = (max_tokens + 1) // 2
        for group in sorted(self._prefilling, key=lambda group: len(group.tokens) - group.num_computed):
            assert group.entry is not None
            if group is oldest:
                num_reserved = 0
            stop = min(len(group.tokens), group.num_computed + max(0, max_tokens - num_reserved))
            if group.first_logits_at < stop < len(group.tokens):  # positions with logits belong to one chunk
                stop = group.first_logits_at
            if group is oldest and group.num_computed == group.first_logits_at:
                stop = len(group.tokens)  # even if these are more than `max_tokens`
            if stop > group.num_computed:
                chunks.append(PrefillChunk(group, group.entry, group.num_computed, stop))
                max_tokens -= stop - group.num_computed
        return chunks

    def _start_rows(self, group: PrefillGroup) -> list[BatchRow]:
        """Makes rows of the members of a group whose prompt is computed."""
        entry = group.entry
        assert entry is not None
        entry.writers.remove(group)
        rows = [BatchRow(member, entry, len(group.tokens)) for member in group.sequences]
        entry.readers += rows
        self._rows += rows
        return rows
