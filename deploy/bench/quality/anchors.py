"""Anchors for keystroke savings: the right word every time, and word trigrams of a training corpus.

The trigrams are a word predictor as in the literature: at each character they suggest the likeliest words that begin
with what is typed of the current word. Scores are those of "stupid backoff" (Brants et al. 2007,
aclanthology.org/D07-1090), optionally mixed with the same scores over the document's own n-grams (a cache: Kuhn and De
Mori 1990, doi 10.1109/34.56193). Knows texts; does not know which of their positions are requested.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from deploy.bench.quality.keystrokes import Answer, Suggest
from deploy.load.passages import Passage

BACKOFF = 0.4  # of Brants et al.
CACHE_WEIGHT = 0.3  # share of the document's scores in the mixture; a round number
NUM_CANDIDATES = 10  # of each order, before they are scored
CONTEXT_CHARS = 200  # hold more than two words

_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]|\n\n")
_PARTIAL_WORD = re.compile(r"\w+(?:['’]\w*)*$")
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_IS_WORD = re.compile(r"\w")
_ID_BITS = 21  # three ids make one key of 63 bits
_AFTER_LAST = "\U0010ffff"

Ids = NDArray[np.int64]


class Ngrams:
    """Counts of 1-, 2- and 3-grams, sorted so that the words which continue a context with a prefix are one slice.

    Ids follow the order of the words, so a prefix is a range of ids, and a context of two words with a prefix is a
    range of keys `(first id × 2²¹ + second id) × 2²¹ + third id`.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        found: dict[str, int] = {}
        parts = []
        for text in texts:
            tokens = _TOKEN.findall(text)
            parts.append(np.array([found.setdefault(token, len(found)) for token in tokens], np.int64))
        self.words = sorted(found)
        order = np.empty(len(found), np.int64)
        order[[found[word] for word in self.words]] = np.arange(len(found))
        parts = [order[part] for part in parts]
        self._levels = [np.unique(_keys(parts, order), return_counts=True) for order in (1, 2, 3)]
        self._num_tokens = sum(len(part) for part in parts)
        self._is_word = np.array([_IS_WORD.match(word) is not None for word in self.words])

    def find(self, word: str) -> int | None:
        """A word's id; None if it is unknown."""
        at = bisect_left(self.words, word)
        return at if at < len(self.words) and self.words[at] == word else None

    def candidates(self, context: Sequence[str], prefix: str) -> set[str]:
        """The words most frequent after the context's last two words, after the last one, and in all."""
        first, last = bisect_left(self.words, prefix), bisect_left(self.words, prefix + _AFTER_LAST)
        found: set[str] = set()
        for level, base in self._bases(context):
            found.update(self._most_frequent(level, base + first, base + last))
        return found

    @lru_cache(maxsize=100_000)  # noqa: B019 - an instance lives as long as the run
    def _most_frequent(self, level: int, first: int, last: int) -> list[str]:
        """The last words of the most frequent n-grams with keys from `first` to before `last`."""
        keys, counts = self._levels[level]
        low, high = np.searchsorted(keys, [first, last])
        ids = keys[low:high] & ((1 << _ID_BITS) - 1)
        counts = counts[low:high] * self._is_word[ids]
        best = np.argsort(-counts, kind="stable")[:NUM_CANDIDATES]
        return [self.words[ids[at]] for at in best if counts[at]]

    def score(self, context: Sequence[str], word: str) -> float:
        """The relative frequency of the word after the longest known context, times `BACKOFF` for each shorter one."""
        number = self.find(word)
        if number is None:
            return 0.0
        factor = 1.0
        for level, base in self._bases(context):
            count = self._count(level, base + number)
            if count:
                whole = self._count(level - 1, base >> _ID_BITS) if level else self._num_tokens
                return factor * count / whole
            factor *= BACKOFF
        return 0.0

    def _bases(self, context: Sequence[str]) -> list[tuple[int, int]]:
        """(level, key without its last id) of each context that is known, the longest first."""
        ids = [self.find(word) for word in context[-2:]]
        bases = [(0, 0)]
        key = 0
        for level, number in enumerate(reversed(ids), 1):
            if number is None:
                break
            key |= number << (_ID_BITS * level)
            bases.insert(0, (level, key))
        return bases

    def _count(self, level: int, key: int) -> int:
        keys, counts = self._levels[level]
        at = int(np.searchsorted(keys, key))
        return int(counts[at]) if at < len(keys) and keys[at] == key else 0


class DocumentNgrams:
    """The same scores over a document that grows at its end."""

    def __init__(self) -> None:
        self._words_by_letter: dict[str, set[str]] = {}
        self._followers: dict[tuple[str, ...], Counter[str]] = {}
        self._tokens: list[str] = []

    def extend(self, tokens: Sequence[str]) -> None:
        for token in tokens:
            for length in range(3):
                if length <= len(self._tokens):
                    context = tuple(self._tokens[len(self._tokens) - length :])
                    self._followers.setdefault(context, Counter())[token] += 1
            self._tokens.append(token)
            self._words_by_letter.setdefault(token[0], set()).add(token)

    def candidates(self, context: Sequence[str], prefix: str) -> set[str]:
        """As those of `Ngrams`; without a prefix, only words that followed the context."""
        found: set[str] = set()
        for known in self._contexts(context):
            followers = self._followers[known]
            words = followers if known else self._words_by_letter.get(prefix[:1], ())
            matching = [word for word in words if word.startswith(prefix) and _IS_WORD.match(word)]
            found.update(nlargest(NUM_CANDIDATES, matching, key=lambda word: (followers[word], word)))
        return found

    def score(self, context: Sequence[str], word: str) -> float:
        factor = 1.0
        for known in self._contexts(context):
            followers = self._followers[known]
            if word in followers:
                return factor * followers[word] / followers.total()
            factor *= BACKOFF
        return 0.0

    def _contexts(self, context: Sequence[str]) -> list[tuple[str, ...]]:
        """The contexts that the document has, the longest first."""
        all_contexts = (tuple(context[len(context) - length :]) for length in (2, 1, 0) if length <= len(context))
        return [each for each in all_contexts if each in self._followers]


def word_suggestions(passage: Passage) -> Suggest:
    """The rest of the current word, always right: the cap of suggestions of one word each."""

    def suggest(position: int) -> Answer:
        found = _WORD.match(passage.text, position)
        return Answer((found.group(),)) if found else Answer()

    return suggest


def trigram_suggestions(ngrams: Ngrams, num_suggestions: int) -> Callable[[Passage], Suggest]:
    """Suggestions from the corpus alone."""

    def of_passage(passage: Passage) -> Suggest:
        def suggest(position: int) -> Answer:
            context, prefix = _split(passage.text[max(0, position - CONTEXT_CHARS) : position])
            words = ngrams.candidates(context, prefix)
            return _best({word: ngrams.score(context, word) for word in words}, prefix, num_suggestions)

        return suggest

    return of_passage


def cached_trigram_suggestions(ngrams: Ngrams, num_suggestions: int) -> Callable[[Passage], Suggest]:
    """Suggestions from the corpus and from all of the document before the position."""

    def of_passage(passage: Passage) -> Suggest:
        document, num_read = DocumentNgrams(), 0

        def suggest(position: int) -> Answer:
            nonlocal document, num_read
            context, prefix = _split(passage.text[max(0, position - CONTEXT_CHARS) : position])
            end = position - len(prefix)
            if end < num_read:
                document, num_read = DocumentNgrams(), 0
            document.extend(_TOKEN.findall(passage.text[num_read:end]))
            num_read = end
            words = ngrams.candidates(context, prefix) | document.candidates(context, prefix)
            scores = {
                word: (1 - CACHE_WEIGHT) * ngrams.score(context, word) + CACHE_WEIGHT * document.score(context, word)
                for word in words
            }
            return _best(scores, prefix, num_suggestions)

        return suggest

    return of_passage


def _split(before: str) -> tuple[list[str], str]:
    """The last two tokens before the current word, and what is typed of it."""
    found = _PARTIAL_WORD.search(before)
    prefix = found.group() if found else ""
    return _TOKEN.findall(before[: len(before) - len(prefix)])[-2:], prefix


def _best(scores: dict[str, float], prefix: str, num_suggestions: int) -> Answer:
    """The rests of the words with the highest scores; equal scores in the order of the words."""
    words = sorted(scores, key=lambda word: (-scores[word], word))
    rests = [word.removeprefix(prefix) for word in words if word != prefix]
    return Answer(tuple(rests[:num_suggestions]))


def _keys(parts: Sequence[Ids], order: int) -> Ids:
    """The keys of all n-grams of this order within each part."""
    keys = []
    for ids in parts:
        key = np.zeros(max(0, len(ids) - order + 1), np.int64)
        for at in range(order):
            key = (key << _ID_BITS) | ids[at : at + len(key)]
        keys.append(key)
    return np.concatenate(keys)
