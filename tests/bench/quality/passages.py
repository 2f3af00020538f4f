"""Passages of prose to type, and the context that an editor sends with each key. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

# What the editor sends of a document (gateway/static/text.js).
MAX_CONTEXT_CHARS = 8192
TRIM_STEP_CHARS = 4096
_WORD_START = re.compile(r"(?<=\s)\S")


@dataclass(frozen=True, slots=True)
class Passage:
    """`text[start:end]` is typed."""

    file: str
    text: str
    start: int
    end: int

    def context(self, position: int, num_characters: int | None = None) -> str:
        """The text before a position: as much as the editor sends, or this many characters."""
        if num_characters is None:
            return trim_context(self.text[:position])
        return self.text[max(0, position - num_characters) : position]


def choose_passages(texts: Mapping[str, str], num_passages: int, num_words: int, rng: random.Random) -> list[Passage]:
    """`num_passages` random passages of `num_words` words of each text, none of which starts in its first words."""
    passages = []
    for file, text in texts.items():
        starts = [found.start() for found in _WORD_START.finditer(text)]
        last = max(1, len(starts) - num_words - 1)
        for _ in range(num_passages):
            first = rng.randrange(min(100, last), last + 1)
            after = first + num_words
            end = starts[after] if after < len(starts) else len(text)
            passages.append(Passage(file, text, starts[first], end))
    return passages


def trim_context(text: str) -> str:
    """The end of a document, as the editor sends it (`trimContext` in gateway/static/text.js)."""
    return text[max(0, (len(text) - MAX_CONTEXT_CHARS) // TRIM_STEP_CHARS * TRIM_STEP_CHARS) :]
