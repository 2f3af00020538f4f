"""Keystroke savings of a simulated writer. Pure: knows texts and suggestions, not where they come from.

The writer goes through passages word by word. At the start of each word the suggestions are shown; the writer accepts
the longest prefix of a suggestion that matches the text up to the end of a word, if that takes fewer keys than typing
it: one key for the first suggestion, two for the others (an arrow, then Tab). Everything else is typed.

The suggestions at a position do not depend on what was accepted before it, so one set of answers serves writers who
are shown one, two or three suggestions, and writers with any latency budget.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from deploy.bench.harness.rounds import percentile

CONTEXT_CHARS = 1500
NUM_RESAMPLES = 2000
_WORD_START = re.compile(r"(?<=\s)\S")


class KeystrokeSavings(msgspec.Struct, kw_only=True, frozen=True):
    """The share of all keys that one writer did not press, with its 95 % confidence interval (bootstrap over
    passages)."""

    file: str
    num_suggestions: int
    budget_ms: float | None  # later suggestions are ignored; None: none is
    share: float
    low: float
    high: float
    num_characters: int


@dataclass(slots=True)
class Passage:
    """`text[start:end]` is typed; suggestions are requested at `positions`, the starts of its words."""

    file: str
    text: str
    start: int
    end: int
    positions: list[int]
    suggestions: dict[int, list[str]] = field(default_factory=dict)  # by position, best first
    latency_ms: dict[int, float] = field(default_factory=dict)

    def context(self, position: int) -> str:
        return self.text[max(0, position - CONTEXT_CHARS) : position]


def choose_passages(texts: Mapping[str, str], num_passages: int, num_words: int, rng: random.Random) -> list[Passage]:
    """`num_passages` random passages of each text, none of which starts in the text's first words."""
    passages = []
    for file, text in texts.items():
        starts = [found.start() for found in _WORD_START.finditer(text)]
        last = max(1, len(starts) - num_words - 1)
        for _ in range(num_passages):
            first = rng.randrange(min(100, last), last + 1)
            positions = starts[first : first + num_words]
            end = starts[first + num_words] if first + num_words < len(starts) else len(text)
            passages.append(Passage(file, text, positions[0], end, positions))
    return passages


def matching_length(suggestion: str, text: str) -> int:
    """The length of the longest common prefix that ends inside a word of neither."""
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(suggestion, text, strict=False))
    num_equal = sum(1 for _ in equal)
    return max(
        (at for at in range(num_equal + 1) if not _is_inside_word(suggestion, at) and not _is_inside_word(text, at)),
        default=0,
    )


def count_keys(passage: Passage, num_suggestions: int, budget_ms: float) -> int:
    """The keys that a passage takes if `num_suggestions` are shown, and those later than `budget_ms` are ignored."""
    num_keys, at = 0, passage.start
    positions = set(passage.positions)
    while at < passage.end:
        best_length, best_cost = 0, 0
        if at in positions and passage.latency_ms[at] <= budget_ms:
            for rank, suggestion in enumerate(passage.suggestions[at][:num_suggestions]):
                length = min(matching_length(suggestion, passage.text[at:]), passage.end - at)
                cost = 1 if rank == 0 else 2
                if length - cost > best_length - best_cost:
                    best_length, best_cost = length, cost
        num_keys += best_cost or 1
        at += best_length or 1
    return num_keys


def keystroke_savings(
    passages: Sequence[Passage], file: str, num_suggestions: int, budget_ms: float
) -> KeystrokeSavings:
    """The savings over all these passages."""
    counts = [(count_keys(found, num_suggestions, budget_ms), found.end - found.start) for found in passages]
    rng = random.Random(0)
    resampled = [_saved_share(rng.choices(counts, k=len(counts))) for _ in range(NUM_RESAMPLES)]
    low, high = percentile(resampled, 0.025), percentile(resampled, 0.975)
    return KeystrokeSavings(
        file=file,
        num_suggestions=num_suggestions,
        budget_ms=None if math.isinf(budget_ms) else budget_ms,
        share=round(_saved_share(counts), 4),
        low=round(low, 4),
        high=round(high, 4),
        num_characters=sum(num_characters for _, num_characters in counts),
    )


def _saved_share(counts: Sequence[tuple[int, int]]) -> float:
    """From (keys, characters) of each passage."""
    return 1 - sum(num_keys for num_keys, _ in counts) / sum(num_characters for _, num_characters in counts)


def _is_inside_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()
