"""What the scheduler hands to a runner: one step, as plain values.

The scheduler makes these, runners execute them. Does not know tensors and devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.engine.prefix_cache import PrefixCacheEntry
    from workers.engine.request import CacheScope
    from workers.engine.sequence import Sequence

# Positions of a KV suffix: with the last position of the prompt, a whole number of the attention kernel's blocks.
SUFFIX_TOKENS = 255


@dataclass(frozen=True, slots=True)
class EntryCopy:
    """Copies the first `length` tokens of the prefix-cache entry `source` to the entry `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class SuffixCopy:
    """Copies the first `length` tokens of the KV suffix `suffix` to `entry`, from position `start` on."""

    suffix: int
    entry: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SuffixMove:
    """Copies the first `length` tokens of the KV suffix `source` to the KV suffix `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class EntryRelease:
    """Returns the memory of a prefix-cache entry to the system."""

    entry: int


Copy = EntryCopy | SuffixCopy | SuffixMove | EntryRelease


@dataclass(eq=False, slots=True)
class PrefillGroup:
    """A prompt that is prefilled once for all sequences that continue it.

    It waits for an entry, then its prompt is computed in chunks, then it may wait for siblings; after that each member
    becomes a row of the batch.

    Attributes:
        tokens: the prompt, followed by `num_forced_ids` forced ids of the sequences.
        sequences: the sequences; siblings that arrive later are added.
        scope: of the sequences' requests, and of what is cached.
        group_size: sequences announced for this prompt.
        sibling_deadline: when the group stops waiting for them, in `time.monotonic()` seconds.
        is_echoed: logits of every position are needed, so nothing may come from the prefix cache.
        entry: where the prompt is computed; None while the group waits for an entry.
        num_computed: tokens whose keys and values are in the entry.
        num_cached: prompt tokens that were in the cache at the start.
        num_forced_ids: forced ids at the end of `tokens`: logits after each of them are needed.
        awaits_siblings: at the current step, so its members do not draw a token yet.
    """

    tokens: tuple[int, ...]
    sequences: list[Sequence]
    scope: CacheScope
    group_size: int
    sibling_deadline: float
    is_echoed: bool
    entry: PrefixCacheEntry | None = None
    num_computed: int = 0
    num_cached: int = 0
    num_forced_ids: int = 0
    awaits_siblings: bool = False

    @property
    def first_logits_at(self) -> int:
        """The first position whose logits are needed."""
        return len(self.tokens) - 1 - self.num_forced_ids


@dataclass(eq=False, slots=True)
class BatchRow:
    """A running sequence: a row of the batch.

    The newest token of the sequence is the input of the next decode step. Keys and values of its first `start` tokens
    are in an entry, those of the next `suffix_length` in a KV suffix. Before its first decode step `start` also counts
    forced ids that were prefilled but not drawn.

    Attributes:
        suffix: index of the KV suffix; -1 before the first decode step.
    """

    sequence: Sequence
    entry: PrefixCacheEntry
    start: int
    suffix: int = -1
    suffix_length: int = 0

    @property
    def position(self) -> int:
        """Of the newest token, which the next decode step computes."""
        return self.start + self.suffix_length


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `start` to `stop` of a prefill group, computed into `entry`. The tokens before are there already."""

    group: PrefillGroup
    entry: PrefixCacheEntry
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.group.tokens)

    @property
    def following_ids(self) -> tuple[int, ...]:
        """The prompt's tokens that the logits of this chunk's positions predict, in order; no forced ids."""
        return self.group.tokens[self.start + 1 : min(self.stop, self.group.first_logits_at) + 1]

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """The sequences that draw their first token from the logits of this chunk."""
        return self.group.sequences if self.is_last and not self.group.awaits_siblings else []


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. The copies, and releases of memory, come first, in their order; everything else is computed together.

    Attributes:
        rows: sequences that decode their newest token, ordered by KV suffix.
        chunks: pieces of prompts to prefill.
        prefilled_rows: sequences whose prompt is in the cache: they draw their first token from logits that the runner
            keeps.
        allows_multi_step: the rows may run several decode steps. False while a group waits for siblings, which may
            arrive at any moment.
    """

    copies: list[Copy]
    rows: list[BatchRow]
    chunks: list[PrefillChunk]
    prefilled_rows: list[BatchRow]
    allows_multi_step: bool = True

    def __bool__(self) -> bool:
        """Whether there is anything to compute or draw."""
        return bool(self.rows or self.chunks or self.prefilled_rows)

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """The sequences that draw a token: of `rows`, of finished prompts in `chunks`, and of `prefilled_rows`."""
        prefilled = [sequence for chunk in self.chunks for sequence in chunk.sampled_sequences]
        rows = [row.sequence for row in self.rows]
        return [*rows, *prefilled, *(row.sequence for row in self.prefilled_rows)]
