"""Keystroke savings: passages to type, what a writer did with the suggestions, and shares with confidence intervals.

Pure. Knows texts and counts; does not know how a writer types (`writers`) or where suggestions come from (`sources`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import msgspec

from deploy.bench.harness.rounds import percentile

# What the editor sends of a document (gateway/static/text.js).
MAX_CONTEXT_CHARS = 8192
TRIM_STEP_CHARS = 4096
NUM_RESAMPLES = 2000
_WORD_START = re.compile(r"(?<=\s)\S")


@dataclass(frozen=True, slots=True)
class Answer:
    """Suggestions at a position, best first, and the time from the request to the answer.

    Attributes:
        usefulness: of each suggestion, the keys that it is expected to save; empty: not predictions.
    """

    suggestions: tuple[str, ...] = ()
    latency_ms: float = 0.0
    usefulness: tuple[float, ...] = ()


# The answer at a position of the text; the same for the same position.
Suggest: TypeAlias = Callable[[int], Answer]


@dataclass(frozen=True, slots=True)
class Passage:
    """`text[start:end]` is typed; `positions` are the starts of its words."""

    file: str
    text: str
    start: int
    end: int
    positions: tuple[int, ...]

    def context(self, position: int, num_characters: int | None = None) -> str:
        """The text before a position: as much as the editor sends, or this many characters."""
        if num_characters is None:
            return trim_context(self.text[:position])
        return self.text[max(0, position - num_characters) : position]


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
    """One suggester under one rule: keystroke savings with a 95 % confidence interval, and how it was used.

    Shares are None where there was nothing to divide by. For the meaning of the counts, see `Usage`.
    """

    file: str  # or "all"
    rule: str
    suggester: str
    num_suggestions: int
    share: float
    low: float
    high: float
    # Savings as a multiple of those with one suggestion; the passages are resampled in pairs.
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    num_characters: int
    num_keys: int
    num_moments: int
    shown: float | None  # share of moments
    accepted: float | None  # share of moments at which something was shown
    accepted_characters: float | None  # share of the characters
    kept_characters: float | None
    words_per_acceptance: float | None
    flicker: float | None  # share of the suggestions that still held


def choose_passages(
    texts: Mapping[str, str], num_passages: int, num_words: int, rng: random.Random, num_characters: int | None = None
) -> list[Passage]:
    """`num_passages` random passages of each text, none of which starts in the text's first words.

    Args:
        num_words: length of each passage.
        num_characters: instead of `num_words`: the passage's last word is the one that reaches this length.
    """
    passages = []
    for file, text in texts.items():
        starts = [found.start() for found in _WORD_START.finditer(text)]
        if num_characters is None:
            last = max(1, len(starts) - num_words - 1)
        else:
            last = max(1, sum(start + num_characters < len(text) for start in starts) - 1)
        for _ in range(num_passages):
            first = rng.randrange(min(100, last), last + 1)
            after = first + num_words
            if num_characters is not None:
                end = starts[first] + num_characters
                after = next((at for at in range(first, len(starts)) if starts[at] >= end), len(starts))
            end = starts[after] if after < len(starts) else len(text)
            passages.append(Passage(file, text, starts[first], end, tuple(starts[first:after])))
    return passages


def trim_context(text: str) -> str:
    """The end of a document, as the editor sends it (`trimContext` in gateway/static/text.js)."""
    return text[max(0, (len(text) - MAX_CONTEXT_CHARS) // TRIM_STEP_CHARS * TRIM_STEP_CHARS) :]


def savings_row(
    file: str, rule: str, suggester: str, num_suggestions: int, usages: Sequence[Usage], base: Sequence[Usage] = ()
) -> SavingsRow:
    """
    Args:
        usages: one for each passage.
        base: of the same passages with one suggestion, for the ratio; empty: no ratio.
    """
    total = sum(usages, Usage())
    counts = [(usage.num_keys, usage.num_characters) for usage in usages]
    rng = random.Random(0)
    low, high = _interval([_savings(rng.choices(counts, k=len(counts))) for _ in range(NUM_RESAMPLES)])
    return SavingsRow(
        file=file,
        rule=rule,
        suggester=suggester,
        num_suggestions=num_suggestions,
        share=round(_savings(counts), 4),
        low=low,
        high=high,
        **_ratio(usages, base),
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


def _ratio(usages: Sequence[Usage], base: Sequence[Usage]) -> dict[str, float]:
    """The ratio of the savings and its interval; empty if one suggestion saves nothing in some resample."""
    counts = [((one.num_keys, one.num_characters), (other.num_keys, other.num_characters))
              for one, other in zip(usages, base, strict=bool(base))]  # fmt: skip
    rng = random.Random(0)
    ratios = []
    for resample in [counts, *(rng.choices(counts, k=len(counts)) for _ in range(NUM_RESAMPLES if counts else 0))]:
        saved, base_saved = _savings([pair[0] for pair in resample]), _savings([pair[1] for pair in resample])
        if base_saved <= 0:
            return {}
        ratios.append(saved / base_saved)
    low, high = _interval(ratios[1:])
    return {"ratio": round(ratios[0], 4), "ratio_low": low, "ratio_high": high}


def _savings(counts: Sequence[tuple[int, int]]) -> float:
    """From (keys, characters) of each passage."""
    num_characters = sum(characters for _, characters in counts)
    return 1 - sum(keys for keys, _ in counts) / num_characters if num_characters else 0.0


def _interval(resampled: Sequence[float]) -> tuple[float, float]:
    return round(percentile(resampled, 0.025), 4), round(percentile(resampled, 0.975), 4)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
