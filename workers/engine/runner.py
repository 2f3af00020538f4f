"""What the backends have in common: the result of a step, and how drawn tokens become its parts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from workers.engine.request import GeneratedToken
from workers.engine.sampling import Draw
from workers.engine.scheduler_output import SUFFIX_TOKENS, BatchRow, SchedulerOutput
from workers.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What a plan gave."""

    # In their order, of a sequence one or more: those after its end are to be dropped.
    steps: list[tuple[Sequence, GeneratedToken]]
    # Where they are wanted: log-probabilities of the prompt's tokens that follow a chunk's.
    echoes: list[tuple[Sequence, list[float]]]
    num_steps: int = 1  # of the plan's rows


class Runner(Protocol):
    """Executes steps on a device, from one thread.

    Attributes:
        num_entries: prefix-cache entries that fit in the device's memory.
    """

    num_entries: int

    def run(self, plan: SchedulerOutput, /) -> RunnerOutput:
        """Executes one step. Any exception means that the device, or the runner, can no longer be used."""
        ...


def num_left(row: BatchRow) -> int:
    """Steps until its text must end, or its suffix is full."""
    num_new = row.sequence.request.sampling.max_new_tokens - row.sequence.num_new
    return min(num_new, SUFFIX_TOKENS - row.suffix_length)


def draw_of(sequence: Sequence, num_forced_ids: int = 0) -> Draw:
    """How the next token of `sequence` is drawn, after so many of its draft."""
    params = sequence.request.sampling
    drafted = sequence.forced_ids[:num_forced_ids]
    seen = (*sequence.tokens(0, sequence.num_tokens), *drafted) if params.repetition_penalty != 1 else ()
    return Draw(
        params, sequence.request.seed, len(sequence.token_ids) + num_forced_ids, seen,
        sequence.allowed_next(num_forced_ids), is_first=sequence.num_new == 0,
    )  # fmt: skip


def draw_all(
    sequences: Items[Sequence], sources: Items[int], sample: Callable[[list[int], list[Draw]], list[GeneratedToken]]
) -> list[tuple[Sequence, GeneratedToken]]:
    """A token of each sequence; of one with a draft, also those that follow while they are the draft's.

    Args:
        sources: where the logits of each sequence's next token are; those of a draft follow.
        sample: draws from the logits at the places it is given.
    """
    drawn: list[tuple[Sequence, GeneratedToken]] = []
    under_way = [(sequence, source, 0) for sequence, source in zip(sequences, sources, strict=True)]
    while under_way:
        draws = [draw_of(sequence, number) for sequence, _, number in under_way]
        steps = sample([source + number for _, source, number in under_way], draws)
        following = []
        for (sequence, source, number), step in zip(under_way, steps, strict=True):
            drawn.append((sequence, step))
            if number < len(sequence.forced_ids) and step.token_id == sequence.forced_ids[number]:
                following.append((sequence, source, number + 1))
        under_way = following
    return drawn
