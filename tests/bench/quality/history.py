"""`history`: whether a writer's own words, from another book of the same author, would improve predictions.

A study of what Tercet does not have: the engine predicts at every character, an n-gram index of the author's words is
mixed in before three suggestions are chosen, and the writer of the literature's rule types with them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.calibrate.predictions import Moment, read_moments
from deploy.load.passages import Passage, choose_passages, trim_context
from shared.errors import StartError
from shared.settings import ModelSpec
from tests.bench.quality.keystrokes import Answer, Usage, savings_row
from tests.bench.quality.writers import write_by_literature
from tests.bench.run import BenchDocument
from workers.text.predicted_words import LENGTH_EXPONENT, PredictedWords

# By author: a book to learn from, and one to write. The embedded checkpoint was trained on all but Anne of Avonlea.
PAIRS = {
    "L. M. Montgomery": ("Anne of Green Gables", "Anne of Avonlea"),
    "Arthur Conan Doyle": ("The Adventures of Sherlock Holmes", "The Hound of the Baskervilles"),
    "H. G. Wells": ("The Invisible Man", "The War of the Worlds"),
    "P. G. Wodehouse": ("A Damsel in Distress", "Leave It to Psmith"),
    "Sinclair Lewis": ("Main Street", "Babbitt"),
}
# The text before the cursor that an editor sends, all text before it, the other book, and all of these.
SOURCES = ("sent", "document", "history", "both")
WEIGHTS = (0.02, 0.05, 0.1, 0.2)  # of the index in the mixture
NUM_SUGGESTIONS = 3
NUM_UNIGRAMS = 50  # the most frequent words, where no word before them is known
_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


class HistoryRow(msgspec.Struct, kw_only=True, frozen=True):
    """Keystroke savings with one source and weight of the index; "none" is the model alone."""

    book: str  # or "all"
    source: str
    weight: float
    is_growing: bool  # the weight grows with the count of the two tokens before the word
    share: float
    points: float  # more than with the model alone


class WordIndex:
    """Counts of words alone, and after one and two tokens."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self._counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        self._last: tuple[str, ...] = ()
        self.add(tokens)

    def add(self, tokens: Iterable[str]) -> None:
        """Append to the text."""
        for token in tokens:
            for number in range(len(self._last) + 1):
                self._counts[self._last[len(self._last) - number :]][token] += 1
            self._last = (*self._last, token)[-2:]

    def predict(self, before: tuple[str, ...], prefix: str) -> tuple[dict[str, float], int]:
        """The words that begin with `prefix` and their probabilities, interpolated (Witten, Bell 1991); and how often
        such a word followed the two tokens `before`."""
        probabilities: dict[str, float] = {}
        count = 0
        for number in range(3):
            found = self._counts.get(before[len(before) - number :]) if number <= len(before) else None
            found = found or Counter[str]()
            pairs = [each for each in found.items() if each[0].startswith(prefix) and each[0][len(prefix) :].isalnum()]
            own = dict(pairs if number else heapq.nlargest(NUM_UNIGRAMS, pairs, key=lambda each: each[1]))
            count, kinds = sum(own.values()), len(own)
            if own:
                probabilities = {
                    word: (own.get(word, 0) + kinds * probabilities.get(word, 0.0)) / (count + kinds)
                    for word in sorted(probabilities.keys() | own.keys())  # an order for words that are equally likely
                }
        return probabilities, count


def run_history(
    spec: ModelSpec, books: Mapping[str, str], num_passages: int, num_words: int, document: BenchDocument, err: Console
) -> None:
    """Fill the document.

    Raises:
        StartError: a book is missing, or the engine fails.
    """
    from workers.predictor import NUM_PATHS  # imports torch

    usages: dict[tuple[str, str, float, bool], list[Usage]] = defaultdict(list)
    for learned, written in PAIRS.values():
        if not {learned, written} <= books.keys():
            raise StartError(f"The corpus has no {learned} or no {written}.")
        passages = choose_passages({written: books[written]}, num_passages, num_words, random.Random(0))
        moments = iter(read_moments(spec, passages, NUM_PATHS, err))
        for passage in passages:
            own = list(itertools.islice(moments, passage.end - passage.start))
            for key, usage in _type(passage, own, _TOKEN.findall(books[learned])):
                usages[(written, *key)].append(usage)
                usages[("all", *key)].append(usage)
    shares = {
        key: savings_row(found, file="", rule="", model="", dtype="", num_suggestions=3).share
        for key, found in usages.items()
    }
    for (book, source, weight, is_growing), share in shares.items():
        points = round(100 * (share - shares[book, "none", 0.0, False]), 2)
        document.rows.append(
            HistoryRow(book=book, source=source, weight=weight, is_growing=is_growing, share=share, points=points)
        )


def history_table(rows: Sequence[HistoryRow]) -> Table:
    books = list(dict.fromkeys(row.book for row in rows))
    table = Table("index of", "weight", *books, title="Points more than the model alone (first row: its savings)")
    cells: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in rows:
        weight = "" if row.source == "none" else f"{row.weight:g}{', growing' if row.is_growing else ''}"
        cells[row.source, weight][row.book] = f"{row.points:+.2f}" if weight else f"{row.share:.1%}"
    for (source, weight), own in cells.items():
        table.add_row(source, weight, *(own[book] for book in books))
    return table


def _type(
    passage: Passage, moments: Sequence[Moment], learned: Sequence[str]
) -> Iterable[tuple[tuple[str, float, bool], Usage]]:
    words = [[each.words(1.0) for each in moment.continuations] for moment in moments]
    predicted = [[each for each in own if each is not None] for own in words]
    yield ("none", 0.0, False), _write(passage, [_choose(own, {}, 0.0) for own in predicted])
    for source in SOURCES:
        index = WordIndex(learned if source in {"history", "both"} else ())
        has_document = source != "history"
        if has_document:
            text = passage.text[: passage.start]
            index.add(_TOKEN.findall(trim_context(text) if source == "sent" else text))
        found, done = [], passage.start
        for at in range(passage.start, passage.end):
            tokens = list(_TOKEN.finditer(passage.text, max(0, at - 200), at))
            is_inside = bool(tokens) and tokens[-1].end() == at and tokens[-1][0][-1].isalnum()
            before = tokens[:-1] if is_inside else tokens
            if has_document and before and before[-1].end() > done:
                index.add(_TOKEN.findall(passage.text, done, before[-1].end()))
                done = before[-1].end()
            prefix = tokens[-1][0] if is_inside else ""
            probabilities, count = index.predict(tuple(each[0] for each in before[-2:]), prefix)
            found.append(({word[len(prefix) :]: p for word, p in probabilities.items()}, count))
        for weight, is_growing in itertools.product(WEIGHTS, (False, True)):
            chosen = [
                _choose(own, likely, weight * (count / (count + 1) if is_growing else 1.0))
                for own, (likely, count) in zip(predicted, found, strict=True)
            ]
            yield (source, weight, is_growing), _write(passage, chosen)


def _choose(predicted: Sequence[PredictedWords], likely: Mapping[str, float], weight: float) -> Answer:
    """The three suggestions of the mixture, ranked as predictions are."""
    texts = {word: word for word in likely}
    mixed = {word: weight * probability for word, probability in likely.items() if weight}
    for words in predicted:  # with distinct first words
        texts[words.first_word] = words.text
        mixed[words.first_word] = mixed.get(words.first_word, 0.0) + (1 - weight) * math.exp(words.logprobs[0])
    ranked = heapq.nlargest(NUM_SUGGESTIONS, mixed, key=lambda word: mixed[word] * len(word) ** LENGTH_EXPONENT)
    return Answer(tuple(texts[word] for word in ranked))


def _write(passage: Passage, answers: Sequence[Answer]) -> Usage:
    return write_by_literature(passage, partial(_at, answers, passage.start), NUM_SUGGESTIONS)


def _at(answers: Sequence[Answer], start: int, position: int) -> Answer:
    return answers[position - start]
