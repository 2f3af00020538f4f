"""Which words a generated continuation is worth showing for: their probabilities, and the keys that they should save.

Pure functions of texts and log-probabilities. Does not know models, tokens' ids and the wire.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.text import NOT_TEXT, expected_keys

# A word with what precedes it: white space, quotation marks, a dash.
_WORD = re.compile(r"\W*?\w+(?:['’]\w+)*")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]»]*(?=\s|$)|[。！？]|\n")
_CONTINUED = re.compile(r"\w|['’]\w")  # after a word: it goes on
UNSCORED_PROBABILITY = 1e-9  # of a fill whose score was not known in time
# A word is kept while it should save at least this many keys. Longer texts save more where any beginning can be taken,
# and less where they keep the place of a better one (docs/TRIED.md).
MIN_WORD_KEYS = 0.005
# Which words are shown: those with the highest P(word) · characters^this. At 0 they cover most, at 1 they save most.
LENGTH_EXPONENT = 0.25


@dataclass(frozen=True, slots=True)
class PredictedWords:
    """The first words of a continuation.

    Attributes:
        text: text of the words, from the end of the context on.
        ends: where each word ends in `text`, in characters.
        first_word: `text` to the end of its first word, which tells predictions apart.
        logprobs: calibrated log-probability of each word together with all words before it.
        usefulness: keys that showing the words should save, against typing them.
    """

    text: str
    ends: tuple[int, ...]
    first_word: str
    logprobs: tuple[float, ...]
    usefulness: float


def predict_words(
    text: str, ends: Sequence[int], logprobs: Sequence[float], *, is_complete: bool, temperature: float
) -> PredictedWords | None:
    """The words of a continuation that are worth reading; None if it has no whole word.

    Never past the end of a sentence or of a line, nor a character that is no text and the word that it is in.

    Args:
        text: the continuation, from the end of the context on.
        ends: where each token ends in `text`, in characters.
        logprobs: log-probability of each token, given the context.
        is_complete: the last word of `text` cannot be continued.
        temperature: calibration; log-probabilities are divided by it.
    """
    text, *rest = NOT_TEXT.split(text, maxsplit=1)
    stop = _SENTENCE_END.search(text)
    limit = stop.start() if stop else len(text)
    words: list[tuple[int, float]] = []
    begin = 0
    while (found := _WORD.match(text, begin, limit)) is not None:
        end = found.end()
        if end == len(text) and (rest or not is_complete):
            break
        # Tokens that begin before the word's end.
        number = next((index + 1 for index, token_end in enumerate(ends) if token_end >= end), len(ends))
        logprob = sum(logprobs[:number]) / temperature
        keys = math.exp(logprob) * (end - begin)
        if words and keys < MIN_WORD_KEYS:
            break
        words.append((end, logprob))
        begin = end
    if not words:
        return None
    ends, word_logprobs = zip(*words, strict=True)
    return _predicted(text[:begin], ends, word_logprobs)


def fill_words(fill: str, probabilities: Mapping[str, float]) -> PredictedWords:
    """The words of a fill of a gap, of which each is as probable as all fills that begin with the words up to it.

    Args:
        probabilities: of all fills that were scored.
    """
    ends = [found.end() for found in _WORD.finditer(fill)] or [len(fill.rstrip())]
    logprobs = [
        math.log(
            UNSCORED_PROBABILITY
            + sum(
                probability
                for other, probability in probabilities.items()
                if other.startswith(fill[:end]) and not _CONTINUED.match(other, end)
            )
        )
        for end in ends
    ]
    return _predicted(fill, ends, logprobs)


def _predicted(text: str, ends: Sequence[int], logprobs: Sequence[float]) -> PredictedWords:
    usefulness = expected_keys(ends, list(map(math.exp, logprobs)))
    return PredictedWords(text, tuple(ends), text[: ends[0]], tuple(logprobs), usefulness)


def rank_predictions(predictions: Sequence[PredictedWords | None]) -> list[int]:
    """Indices of the predictions with distinct first words, those first that should be shown first."""
    values = {
        index: words.logprobs[0] + LENGTH_EXPONENT * math.log(len(words.first_word))
        for index, words in enumerate(predictions)
        if words is not None
    }
    return distinct_first_words(sorted(values, key=lambda index: -values[index]), predictions)


def distinct_first_words(order: Sequence[int], predictions: Sequence[PredictedWords | None]) -> list[int]:
    """The indices of `order` without those that are None or begin with the first word of an earlier prediction."""
    first: dict[str, int] = {}
    for index in order:
        if (words := predictions[index]) is not None:
            first.setdefault(words.first_word, index)
    return list(first.values())
