"""What runners have in common: their interface, their result, and how drawn tokens become it.

Plain Python: does not know tensors and devices.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

from workers.engine.arithmetic_code import Code
from workers.engine.draw import Draw
from workers.engine.errors import EngineFailure
from workers.engine.request import GeneratedToken, PromptLogprobs
from workers.engine.result_stream import MAX_DELIVERY_DELAY_S, NUM_DELIVERED_SINGLY
from workers.engine.scheduler_output import SUFFIX_TOKENS, BatchRow, SchedulerOutput
from workers.engine.sequence import Sequence

# Of one multi-step decode: the watchdog, deadlines and new sequences wait for its end, if it is not interrupted.
MAX_MULTI_STEP_S = 0.05


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The result of a step.

    Attributes:
        tokens: generated tokens in their order, one or more for each sequence that draws. Those that follow the end of
            their sequence are to be dropped.
        prompt_logprobs: for sequences that echo their prompt: log-probabilities of the prompt's tokens, chunk after
            chunk.
        num_steps: decode steps computed for the rows of the batch.
        failures: sequences whose own work failed (their prefill, echo, or sampling); the step is valid for all others.
            They have no token. What was prefilled for them alone is not in the cache.
    """

    tokens: list[tuple[Sequence, GeneratedToken]]
    prompt_logprobs: list[tuple[Sequence, PromptLogprobs]]
    num_steps: int = 1
    failures: list[tuple[Sequence, EngineFailure]] = field(default_factory=list)


class Runner(Protocol):
    """Executes steps on a device, from one thread.

    Attributes:
        num_entries: prefix-cache entries that fit in the device's memory.
    """

    num_entries: int

    def run(self, plan: SchedulerOutput, /) -> RunnerOutput:
        """Executes one step. After an exception, `drop_caches` must precede the next step."""
        ...

    def drop_caches(self) -> None:
        """Drops what it keeps from step to step. The caller uses no prefix-cache entry and no KV suffix any longer."""
        ...


def num_left(row: BatchRow) -> int:
    """Decode steps until the row's sequence may end: it has `max_new_tokens`, or its KV suffix is full."""
    if row.sequence.request.sampling.min_logprob is not None:
        return 1
    num_new = row.sequence.request.sampling.max_new_tokens - row.sequence.num_new
    return min(num_new, SUFFIX_TOKENS - row.suffix_length)


def multi_step_budget_s(sequence: Sequence, now: float) -> float:
    """How long a multi-step decode that includes `sequence` may take; 0 for a single step.

    Args:
        now: `time.monotonic()` seconds.
    """
    request = sequence.request
    budget_s = MAX_MULTI_STEP_S
    if request.deadline is not None:
        budget_s = min(budget_s, request.deadline - now)
    if request.sampling.stop or request.sampling.single_line:
        budget_s = min(budget_s, MAX_DELIVERY_DELAY_S)  # steps after a stop string are computed for nothing
    if request.stream:
        is_batched = len(sequence.token_ids) >= NUM_DELIVERED_SINGLY
        budget_s = min(budget_s, MAX_DELIVERY_DELAY_S if is_batched else 0.0)
    return budget_s


def draw_of(sequence: Sequence, num_forced_ids: int = 0, code: Code | None = None) -> Draw:
    """The draw of the next token of `sequence`, or of the token after the first `num_forced_ids` forced ids.

    Args:
        code: after the draw of the last of these ids; None for the sequence's.
    """
    params = sequence.request.sampling
    ahead = sequence.forced_ids[:num_forced_ids]
    seen = (*sequence.tokens(0, sequence.num_tokens), *ahead) if params.repetition_penalty != 1 else ()
    # Without those of the forced prefix, and `ahead` are such: the user typed them.
    generated = tuple(sequence.token_ids[sequence.num_forced :]) if params.has_count_penalty else ()
    return Draw(
        params, sequence.request.seed, len(sequence.token_ids) + num_forced_ids, code or sequence.code, seen,
        sequence.allowed_next(num_forced_ids), is_first=sequence.num_new == 0, generated=generated,
    )  # fmt: skip


def draw_all(
    sequences: Items[Sequence],
    sources: Items[int],
    sample: Callable[[list[int], list[Draw]], list[GeneratedToken]],
    path: Callable[[Sequence, int], list[GeneratedToken]],
) -> list[tuple[Sequence, GeneratedToken]]:
    """Draws a token for each sequence, and further tokens as long as they are the prefilled forced ids.

    Args:
        sources: row of the logits for each sequence's next token; the rows for the tokens after its forced ids follow.
        sample: draws from the given rows of the logits.
        path: the tokens of a sequence that starts with a ranked path, and the row after its prompt.
    """
    pairs = list(zip(sequences, sources, strict=True))
    drawn = [(sequence, token) for sequence, source in pairs if sequence.starts_with_path
             for token in path(sequence, source)]  # fmt: skip
    pending = [(sequence, source, 0, sequence.code) for sequence, source in pairs if not sequence.starts_with_path]
    while pending:
        draws = [draw_of(sequence, number, code) for sequence, _, number, code in pending]
        tokens = sample([source + number for _, source, number, _ in pending], draws)
        matching = []
        for (sequence, source, number, code), token in zip(pending, tokens, strict=True):
            drawn.append((sequence, token))
            if number < len(sequence.forced_ids) and token.token_id == sequence.forced_ids[number]:
                matching.append((sequence, source, number + 1, token.code or code))
        pending = matching
    return drawn
