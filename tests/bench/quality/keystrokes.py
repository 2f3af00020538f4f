"""Keystroke savings: what a writer did with the suggestions, and shares with confidence intervals.

Pure. Knows texts and counts; does not know how a writer types or where suggestions come from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import msgspec

from deploy.load.rounds import percentile

NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Answer:
    """Suggestions at a position, best first, and the time from the request to the answer.

    Attributes:
        usefulness: keys that each suggestion is expected to save; empty if they are not predictions.
    """

    suggestions: tuple[str, ...] = ()
    latency_ms: float = 0.0
    usefulness: tuple[float, ...] = ()


# The answer at a position of the text; the same for the same position.
Suggest: TypeAlias = Callable[[int], Answer]


@dataclass(slots=True, kw_only=True)
class Usage:
    """What a writer did with the suggestions. A moment is a request, or a key after which nothing may be shown."""

    num_characters: int = 0
    num_keys: int = 0
    num_moments: int = 0
    num_moments_shown: int = 0  # with at least one suggestion on show
    num_accepted: int = 0
    num_accepted_characters: int = 0
    num_kept_characters: int = 0  # accepted and not deleted
    num_accepted_words: int = 0
    num_holding: int = 0  # suggestions that still agreed with the text at the next moment
    num_replaced: int = 0  # of these, those whose place then had another text or none

    def __add__(self, other: Usage) -> Usage:
        names = [each.name for each in fields(self)]
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in names})


class SavingsRow(msgspec.Struct, kw_only=True, frozen=True):
    """One rule: keystroke savings with a 95 % confidence interval, and how it was used.

    Shares are None where there was nothing to divide by. For the meaning of the counts, see `Usage`.
    """

    file: str  # or "all"
    rule: str
    num_suggestions: int
    share: float
    low: float
    high: float
    num_characters: int
    num_keys: int
    num_moments: int
    shown: float | None  # share of moments
    accepted: float | None  # share of moments at which something was shown
    accepted_characters: float | None  # share of the characters
    kept_characters: float | None
    words_per_acceptance: float | None
    flicker: float | None  # share of the suggestions that still held


def savings_row(file: str, rule: str, num_suggestions: int, usages: Sequence[Usage]) -> SavingsRow:
    """
    Args:
        usages: one for each passage.
    """
    total = sum(usages, Usage())
    counts = [(usage.num_keys, usage.num_characters) for usage in usages]
    rng = random.Random(0)
    low, high = _interval([_savings(rng.choices(counts, k=len(counts))) for _ in range(NUM_RESAMPLES)])
    return SavingsRow(
        file=file,
        rule=rule,
        num_suggestions=num_suggestions,
        share=round(_savings(counts), 4),
        low=low,
        high=high,
        num_characters=total.num_characters,
        num_keys=total.num_keys,
        num_moments=total.num_moments,
        shown=_share(total.num_moments_shown, total.num_moments),
        accepted=_share(total.num_accepted, total.num_moments_shown),
        accepted_characters=_share(total.num_accepted_characters, total.num_characters),
        kept_characters=_share(total.num_kept_characters, total.num_characters),
        words_per_acceptance=_share(total.num_accepted_words, total.num_accepted),
        flicker=_share(total.num_replaced, total.num_holding),
    )


def _savings(counts: Sequence[tuple[int, int]]) -> float:
    """Compute savings from (keys, characters) of each passage."""
    num_characters = sum(characters for _, characters in counts)
    return 1 - sum(keys for keys, _ in counts) / num_characters if num_characters else 0.0


def _interval(resampled: Sequence[float]) -> tuple[float, float]:
    return round(percentile(resampled, 0.025), 4), round(percentile(resampled, 0.975), 4)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
