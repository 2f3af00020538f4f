"""An n-gram cache of a document: token counts after short contexts, and their mixture with a model's probability.

The mixture interpolates recursively from the shortest context to the longest, as Jelinek and Mercer (1980) do; counting
in the document itself is the cache of Kuhn and De Mori (1990, doi 10.1109/34.56193). Pure. Knows token ids and
probabilities; does not know text, tokenizers or the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

NUM_ORDERS = 4  # contexts of 0 to 3 tokens
_ID_BITS = 21  # exceeds every vocabulary


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
        # For each length of context: context as one number → token → count.
        self._followers: list[dict[int, dict[int, int]]] = [{} for _ in range(NUM_ORDERS)]
        self._last: list[int] = []  # the newest first
        self.num_tokens = 0

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            for level, context in zip(self._followers, self._contexts(), strict=False):
                followers = level.setdefault(context, {})
                followers[token_id] = followers.get(token_id, 0) + 1
            self._last = [token_id, *self._last[: NUM_ORDERS - 2]]
            self.num_tokens += 1

    def frequencies(self, token_id: int) -> list[Frequency]:
        """Counts of this token after the last tokens, `[number of contexts that occurred]`, the shortest context first.

        A context occurs only if every shorter one does.
        """
        found = []
        for level, context in zip(self._followers, self._contexts(), strict=False):
            followers = level.get(context)
            if followers is None:
                break
            found.append(Frequency(followers.get(token_id, 0), sum(followers.values())))
        return found

    def _contexts(self) -> Iterator[int]:
        """The last 0, 1, 2 and 3 tokens, as one number each; fewer at the beginning."""
        context = 0
        yield context
        for token_id in self._last:
            context = context << _ID_BITS | token_id
            yield context


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
