"""Keystroke savings: what a writer did with the suggestions, and shares with confidence intervals.

Pure. Knows texts and counts; does not know how a writer types or where suggestions come from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from tests.bench.results import Row
from tests.bench.rounds import percent, percentile

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Answer:
    """Suggestions at a position, best first, and the time from the request to the answer.

    Attributes:
        usefulness: keys that each suggestion is expected to save; empty if they are not predictions.
        words: of each suggestion, with the probability that all up to it come next; none if they are not predictions.
    """

    suggestions: tuple[str, ...] = ()
    latency_ms: float = 0.0
    usefulness: tuple[float, ...] = ()
    words: tuple[tuple[tuple[str, float], ...], ...] = ()


# The answer at a position of the text; the same for the same position.
Suggest: TypeAlias = Callable[[int], Answer]


@dataclass(slots=True, kw_only=True)
class Usage:
    """What a writer did with the suggestions. A moment is a request, or a key after which nothing may be shown."""

    num_characters: int = 0
    num_keys: int = 0
    num_moments: int = 0
    num_moments_shown: int = 0  # with at least one suggestion on show
    num_moments_right: int = 0  # of these, those at which all of the first one comes next, and a word ends there
    num_accepted: int = 0
    num_accepted_characters: int = 0
    num_kept_characters: int = 0  # accepted and not deleted
    num_accepted_words: int = 0
    num_holding: int = 0  # suggestions that still agreed with the text at the next moment
    num_replaced: int = 0  # of these, those whose place then had another text or none
    num_changed: int = 0  # moments with another first suggestion than the moment before, which had one, too
    num_pauses: int = 0  # for thought
    num_pauses_shown: int = 0  # with at least one suggestion on show at their end
    num_pauses_taken: int = 0  # of these, those after which the writer took at least one whole word

    def __add__(self, other: Usage) -> Usage:
        names = [each.name for each in fields(self)]
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in names})


def savings(usages: Sequence[Usage]) -> str:
    """Keystroke savings in percent, with a 95 % confidence interval.

    Args:
        usages: one for each passage.
    """
    counts = [(usage.num_keys, usage.num_characters) for usage in usages]
    rng = random.Random(0)
    resampled = [_savings(rng.choices(counts, k=len(counts))) for _ in range(NUM_RESAMPLES)]
    low, high = (100 * percentile(resampled, share) for share in (0.025, 0.975))
    return f"{100 * _savings(counts):.1f} ({low:.1f}–{high:.1f})"


def usage_row(use: Usage) -> Row:
    """How the suggestions were used, in percent but for the words."""
    return {
        "shown at": percent(use.num_moments_shown, use.num_moments),
        "right when shown": percent(use.num_moments_right, use.num_moments_shown),
        "accepted": percent(use.num_accepted, use.num_moments_shown),
        "characters accepted": percent(use.num_accepted_characters, use.num_characters),
        "and kept": percent(use.num_kept_characters, use.num_characters),
        "words per acceptance": use.num_accepted_words / max(1, use.num_accepted),
        "flicker": percent(use.num_replaced, use.num_holding),
        "changed": percent(use.num_changed, use.num_moments),
        "shown at pauses": percent(use.num_pauses_shown, use.num_pauses),
        "taken there": percent(use.num_pauses_taken, use.num_pauses_shown),
    }


def _savings(counts: Sequence[tuple[int, int]]) -> float:
    """Compute savings from (keys, characters) of each passage."""
    num_characters = sum(characters for _, characters in counts)
    return 1 - sum(keys for keys, _ in counts) / num_characters if num_characters else 0.0
