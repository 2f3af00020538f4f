"""The values that scheduler, prefix cache and runners share: entries, copies, rows of the batch, and a step.

The scheduler makes a `SchedulerOutput`, a runner executes it and returns a `RunnerOutput`. Does not know tensors and
devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.memory_plan import SUFFIX_TOKENS
from workers.engine.failures import EngineFailure
from workers.engine.request import CacheScope, GeneratedToken, PromptLogprobs
from workers.engine.sequence import Sequence


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
class PrefixCacheEntry:
    """Memory for the keys and values of one prompt, from position 0.

    Attributes:
        scope: scope of the requests that wrote the tokens; without meaning while there are none.
        tokens: whose keys and values are there.
        logits_at: number of tokens after which the runner keeps logits; 0 if it keeps none.
        num_logits: rows of logits kept, the last of them after `logits_at` tokens.
        readers: rows of the batch that attend to the entry.
        writers: prefill groups that compute into it, or wait for siblings with their prompt in it.
        used_at: number of the placement that last used the entry; the smallest is evicted first.
        num_allocated: tokens that the entry's memory holds; it stays when tokens are evicted, until it is released.
    """

    index: int
    scope: CacheScope = None
    tokens: list[int] = field(default_factory=list)
    logits_at: int = 0
    num_logits: int = 0
    readers: list[BatchRow] = field(default_factory=list)
    writers: list[PrefillGroup] = field(default_factory=list)
    used_at: int = 0
    num_allocated: int = 0

    @property
    def is_unused(self) -> bool:
        """Whether the entry may be overwritten: it is cached at most."""
        return not self.readers and not self.writers

    def num_tokens_in_use(self, besides: BatchRow | None = None) -> int:
        """How many of its first tokens readers (but `besides`) or writers need."""
        lengths = [reader.start for reader in self.readers if reader is not besides]
        return max([*lengths, *(len(writer.tokens) for writer in self.writers)], default=0)

    def has_logits(self, num_tokens: int, num_rows: int) -> bool:
        """Whether logits are kept after `num_tokens` tokens, and after each of the `num_rows - 1` before."""
        return self.logits_at == num_tokens and self.num_logits >= num_rows


@dataclass(eq=False, slots=True)
class PrefillGroup:
    """A prompt that is prefilled once for all sequences that continue it.

    It waits for an entry, then its prompt is computed in chunks, then it may wait for siblings; after that each member
    becomes a row of the batch.

    Attributes:
        tokens: the prompt, followed by `num_forced_ids` forced ids of the sequences.
        sequences: the sequences; siblings that arrive later are added.
        scope: scope of the sequences' requests, and of what is cached.
        group_size: sequences announced for this prompt.
        sibling_deadline: when the group stops waiting for them, in `time.monotonic()` seconds.
        is_echoed: log-probabilities of the prompt's tokens are needed, from `echo_from` on.
        echo_from: index of the first of these; 0 if it is the whole prompt.
        entry: where the prompt is computed; None while the group waits for an entry.
        num_computed: tokens whose keys and values are in the entry.
        num_cached: prompt tokens that were in the cache at the start.
        num_forced_ids: forced ids at the end of `tokens`: logits after each of them are needed.
        awaits_siblings: whether it waits at the current step, so its members do not draw a token yet.
    """

    tokens: tuple[int, ...]
    sequences: list[Sequence]
    scope: CacheScope
    group_size: int
    sibling_deadline: float
    is_echoed: bool
    echo_from: int = 0
    entry: PrefixCacheEntry | None = None
    num_computed: int = 0
    num_cached: int = 0
    num_forced_ids: int = 0
    awaits_siblings: bool = False

    @property
    def num_cacheable(self) -> int:
        """How many tokens may come from the prefix cache: the logits of an echo are not kept there."""
        return max(0, self.echo_from - 1) if self.is_echoed else len(self.tokens)

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
        """Position of the newest token, which the next decode step computes."""
        return self.start + self.suffix_length

    @property
    def num_steps_left(self) -> int:
        """Decode steps until the sequence may end: it has `max_new_tokens`, or its KV suffix is full."""
        sampling = self.sequence.request.sampling
        if sampling.min_logprob is not None:
            return 1
        return min(sampling.max_new_tokens - self.sequence.num_new, SUFFIX_TOKENS - self.suffix_length)


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

    def multi_step_budget_s(self, now: float) -> float:
        """How long a multi-step decode of the rows may take; 0 for a single step.

        Args:
            now: `time.monotonic()` seconds.
        """
        if not self.allows_multi_step:
            return 0.0
        return min(row.sequence.multi_step_budget_s(now) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The result of a step.

    Attributes:
        tokens: generated tokens in their order, one or more for each sequence that draws. Those that follow the end of
            their sequence are to be dropped.
        prompt_logprobs: for sequences that echo their prompt, log-probabilities of the prompt's tokens, chunk after
            chunk.
        num_steps: decode steps computed for the rows of the batch.
        failures: sequences whose own work failed (their prefill, echo, or sampling); the step is valid for all others.
            They have no token. What was prefilled for them alone is not in the cache.
    """

    tokens: list[tuple[Sequence, GeneratedToken]]
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]]
    num_steps: int = 1
    failures: list[tuple[Sequence, EngineFailure]] = field(default_factory=list)
