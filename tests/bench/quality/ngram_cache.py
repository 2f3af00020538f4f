"""An n-gram cache of a document: token counts after short contexts, and their mixture with a model's probability.

The mixture interpolates recursively from the shortest context to the longest, as Jelinek and Mercer (1980) do; counting
in the document itself is the cache of Kuhn and De Mori (1990, doi 10.1109/34.56193). Pure. Knows token ids and
probabilities; does not know text, tokenizers or the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

NUM_ORDERS = 4  # contexts of 0 to 3 tokens


class Weight(NamedTuple):
    """The cache's share of the mixture for one length of context: cap · N ÷ (N + k) if the context occurred N times."""

    cap: float
    k: float


class Frequency(NamedTuple):
    """How often a token followed a context, and how often any token did."""

    occurrences: int
    total: int


class NgramIndex:
    """Counts of the tokens after each context of 0 to 3 tokens, in a sequence of tokens that grows at its end."""

    def __init__(self) -> None:
        # For each length of context: context → token → count.
        self._followers: list[dict[tuple[int, ...], Counter[int]]] = [{} for _ in range(NUM_ORDERS)]
        self._last: tuple[int, ...] = ()  # the newest first

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            for level, context in zip(self._followers, self._contexts(), strict=False):
                level.setdefault(context, Counter())[token_id] += 1
            self._last = (token_id, *self._last[: NUM_ORDERS - 2])

    def frequencies(self, token_id: int) -> list[Frequency]:
        """Counts of this token after the last tokens, `[number of contexts that occurred]`, the shortest context first.

        A context occurs only if every shorter one does.
        """
        found = []
        for level, context in zip(self._followers, self._contexts(), strict=False):
            followers = level.get(context)
            if followers is None:
                break
            found.append(Frequency(followers[token_id], followers.total()))
        return found

    def _contexts(self) -> Iterator[tuple[int, ...]]:
        """The last 0, 1, 2 and 3 tokens; fewer at the beginning."""
        return (self._last[:length] for length in range(1 + len(self._last)))


def mix(probability: float, frequencies: Sequence[Frequency], weights: Sequence[Weight]) -> float:
    """A token's probability in the mixture. Over a vocabulary, the mixtures sum to what the probabilities sum to.

    Args:
        probability: the model's.
        frequencies: `NgramIndex.frequencies` of the token, before the index has it.
        weights: `[NUM_ORDERS]`, the shortest context first.
    """
    for (occurrences, total), (cap, k) in zip(frequencies, weights, strict=False):
        share = cap * total / (total + k)
        probability = share * occurrences / total + (1 - share) * probability
    return probability
