"""What a step of the engine consists of, and the places that it speaks of.

Plain values: the scheduler makes them, the runner carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.sequence import Sequence

SUFFIX_TOKENS = 255  # with the position where the prompt hands over, a whole block of the attention


@dataclass(frozen=True, slots=True)
class EntryCopy:
    """The first `length` tokens of entry `source`, to entry `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class SuffixCopy:
    """The first `length` tokens of a suffix, to a entry, from position `start` on."""

    suffix: int
    entry: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SuffixMove:
    """The first `length` tokens of suffix `source`, to suffix `target`."""

    source: int
    target: int
    length: int


Copy = EntryCopy | SuffixCopy | SuffixMove


@dataclass(eq=False, slots=True)
class PrefixCacheEntry:
    """A prompt's place in the cache."""

    index: int
    tokens: list[int] = field(default_factory=list)  # computed, from position 0 on
    logits_at: int = 0  # tokens after which logits are kept; 0 is nowhere
    num_logits: int = 0  # how many, the last of them there
    readers: list[BatchRow] = field(default_factory=list)
    writers: list[PrefillGroup] = field(default_factory=list)
    used_at: int = 0

    @property
    def is_free(self) -> bool:
        """Whether nobody needs what is in it; it may be remembered all the same."""
        return not self.readers and not self.writers

    def num_relied_on(self, besides: BatchRow | None = None) -> int:
        """How many of its first tokens somebody reads, or will."""
        lengths = [reader.start for reader in self.readers if reader is not besides]
        return max([*lengths, *(len(writer.tokens) for writer in self.writers)], default=0)


@dataclass(eq=False, slots=True)
class PrefillGroup:
    """A prompt that waits, is being computed, or has been before all its siblings came; and whom it is for.

    Its last tokens may be a draft of what the sequences say first: their logits are wanted, and those before them.
    """

    tokens: tuple[int, ...]
    members: list[Sequence]
    group_size: int  # siblings that are to come
    waits_until: float  # for siblings; time.monotonic() seconds
    is_echoed: bool  # all its logits are wanted: nothing of it may come from the cache
    entry: PrefixCacheEntry | None = None  # None while it waits
    num_computed: int = 0
    num_cached: int = 0
    num_forced_ids: int = 0
    is_held: bool = False  # as of the newest plan: its members do not draw yet, for siblings may come

    @property
    def first_wanted(self) -> int:
        """The first position whose logits somebody draws from."""
        return len(self.tokens) - 1 - self.num_forced_ids


@dataclass(eq=False, slots=True)
class BatchRow:
    """A sequence that runs: its first `start` tokens are in a entry, the others in a suffix.

    The newest token is in neither: it is what the next step computes. Until then `start` may count tokens of a draft
    that were not drawn.
    """

    sequence: Sequence
    entry: PrefixCacheEntry
    start: int
    suffix: int = -1
    suffix_length: int = 0

    @property
    def position(self) -> int:
        """Of the token that the next step computes."""
        return self.start + self.suffix_length


@dataclass(frozen=True, slots=True)
class CachedSuffix:
    """What a suffix holds whose sequence has ended, and the entry and position that it continues."""

    entry: PrefixCacheEntry
    start: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `start` to `stop` of a prompt, to be computed into a entry."""

    prompt: PrefillGroup
    entry: PrefixCacheEntry
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prompt.tokens)

    @property
    def drawing(self) -> list[Sequence]:
        """Who draws a token from what comes after it."""
        return self.prompt.members if self.is_last and not self.prompt.is_held else []


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: the copies first, in their order, then all else at once."""

    copies: list[Copy]
    rows: list[BatchRow]  # compute the newest token of each; in the order of their suffixes
    chunks: list[PrefillChunk]
    ready: list[BatchRow]  # nothing to compute: the logits after their prompt are kept
    allows_multi_step: bool = True  # to further steps of the rows; not where somebody's siblings may come at any moment

    def __bool__(self) -> bool:
        return bool(self.rows or self.chunks or self.ready)

    @property
    def draws(self) -> list[Sequence]:
        """Who gets a token: first the rows, then those whose prompt is complete, then the ready."""
        members = [one for chunk in self.chunks for one in chunk.drawing]
        rows = [row.sequence for row in self.rows]
        return [*rows, *members, *(row.sequence for row in self.ready)]
