"""`gap`: words missing inside a sentence of prose unknown to the model, and how often a suggestion has them.

Each gap is requested twice, with the text after it and without. The text before it ends with a space, the text after it
begins with one, as where a writer has deleted words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tests.bench.quality.keystrokes import Answer
from tests.bench.quality.suggestions import SEEDS_APART, ask
from tests.bench.quality.typist import describe_latencies
from tests.bench.results import Row
from tests.bench.rounds import percent
from tests.bench.run import BenchDocument, Options

MAX_GAP_WORDS = 6
NUM_SUGGESTIONS = 3
# Words of a sentence that stay before a gap and after it, at least.
MIN_WORDS_AROUND = 2
# Characters after the gap: to the end of the line, as the client library sends, or as many as the gateway passes on.
NUM_AFTER_CHARS = 200
_SENTENCE = re.compile(r"(?<=[.!?]\s)[A-Z](?:[^.!?\n]|\n(?!\n))+[.!?]")
_WORD = re.compile(r"\w+(?:['’]\w+)*")


class Gap(msgspec.Struct, frozen=True):
    """`text[start:end]` is missing."""

    text: str
    start: int
    end: int
    num_words: int

    @property
    def after(self) -> str:
        """The text after the gap that is sent."""
        return self.text[self.end :].split("\n\n", 1)[0][:NUM_AFTER_CHARS]


def choose_gaps(texts: Iterable[str], num_sentences: int, rng: random.Random) -> list[Gap]:
    """A gap of each length in each of `num_sentences` random sentences of each text; fewer if the text has fewer."""
    gaps = []
    for text in texts:
        sentences = [_word_spans(found) for found in _SENTENCE.finditer(text)]
        long = [words for words in sentences if len(words) >= MAX_GAP_WORDS + 2 * MIN_WORDS_AROUND]
        for words in rng.sample(long, min(num_sentences, len(long))):
            for num_words in range(1, MAX_GAP_WORDS + 1):
                first = rng.randint(MIN_WORDS_AROUND, len(words) - MIN_WORDS_AROUND - num_words)
                gaps.append(Gap(text, words[first][0], words[first + num_words - 1][1], num_words))
    return gaps


def run_gaps(
    options: Options,
    texts: Mapping[str, str],
    num_sentences: int,
    fields: Mapping[str, Any],
    document: BenchDocument,
) -> None:
    """Fill the document.

    Args:
        fields: fields of each request, as in `POST /autocomplete`.

    Raises:
        StartError: a request failed.
    """
    gaps = choose_gaps(texts.values(), num_sentences, random.Random(options.seed))
    # Without the text after the gap, with it, and where nothing is missing.
    cursors = [
        (gap.text[:end], after, SEEDS_APART * number)
        for number, gap in enumerate(gaps)
        for end, after in ((gap.start, ""), (gap.start, gap.after), (gap.end, gap.after))
    ]
    answers = ask(options, cursors, {"n_samples": NUM_SUGGESTIONS, **fields}, document)
    document.workload["num_sentences"] = num_sentences
    by_suffix = {False: answers[::3], True: answers[1::3]}
    document.rows = list(_rows(gaps, by_suffix))
    num_silent = sum(not answer.suggestions for answer in answers[2::3])
    document.notes.append(f"Where nothing is missing, nothing is suggested in {num_silent} of {len(gaps)} places.")
    for has_suffix, own in by_suffix.items():
        latencies = describe_latencies([answer.latency_ms for answer in own])
        document.notes.append(f"{'With' if has_suffix else 'Without'} the text after the gap: {latencies}")


def _rows(gaps: Sequence[Gap], answers: Mapping[bool, Sequence[Answer]]) -> Iterator[Row]:
    """Gaps of one length, then of all: shares with the missing words among the suggestions, and with the first of them.

    A suggestion that only begins with the missing words is no exact match; without the text after the gap it is counted
    as one: the writer would delete the rest of it.
    """
    for num_words in (*range(1, MAX_GAP_WORDS + 1), "all"):
        chosen = [index for index, gap in enumerate(gaps) if num_words in ("all", gap.num_words)]
        row: Row = {"words": num_words, "gaps": len(chosen)}
        for has_suffix, own in answers.items():
            found = [_match(own[index], gaps[index], is_whole=has_suffix) for index in chosen]
            for of, column in zip(("exact", "first word"), zip(*found, strict=True), strict=False):
                row[f"{of}{', with suffix' * has_suffix}, %"] = percent(sum(column), len(found))
        yield row


def _match(answer: Answer, gap: Gap, *, is_whole: bool) -> tuple[bool, bool]:
    """Whether a suggestion has the missing words, and whether one has the first of them, without its punctuation."""
    suggestions, wanted = [text.split() for text in answer.suggestions], gap.text[gap.start : gap.end].split()
    is_exact = any(words[: None if is_whole else len(wanted)] == wanted for words in suggestions)
    return is_exact, _first_word(wanted) in map(_first_word, suggestions)


def _first_word(words: Sequence[str]) -> str:
    found = _WORD.search(" ".join(words))
    return found[0] if found else ""


def _word_spans(sentence: re.Match[str]) -> list[tuple[int, int]]:
    start = sentence.start()
    return [(start + found.start(), start + found.end()) for found in re.finditer(r"\S+", sentence[0])]
