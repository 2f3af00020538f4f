"""`gap`: words missing inside a sentence of prose unknown to the model, and how often a suggestion has them.

Each gap is requested twice, with the text after it and without. The text before it ends with a space, the text after it
begins with one, as where a writer has deleted words.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.load.run import progress
from tests.bench.quality.keystrokes import Answer
from tests.bench.quality.passages import trim_context
from tests.bench.quality.suggestions import SEEDS_APART, gateway_source
from tests.bench.quality.typist import describe_latencies
from tests.bench.run import BenchDocument, Options

MAX_GAP_WORDS = 6
NUM_SUGGESTIONS = 3
# Words of a sentence that stay before a gap and after it, at least.
MIN_WORDS_AROUND = 2
# Characters after the gap: to the end of the line, as the client library sends, or as many as the gateway passes on.
NUM_AFTER_CHARS = 200
_SENTENCE = re.compile(r"(?<=[.!?]\s)[A-Z](?:[^.!?\n]|\n(?!\n))+[.!?]")
_WORD = re.compile(r"\w+(?:['’]\w+)*")


class GapRow(msgspec.Struct, kw_only=True, frozen=True):
    """Gaps of one length: shares with the missing words, and with the first of them, among three suggestions.

    A suggestion that only begins with the missing words is no exact match; without the text after the gap it is counted
    as one: the writer would delete the rest of it. `stated_keys` is the mean usefulness of the first suggestions,
    `saved_keys` what they save: the characters of their words up to the first wrong one, but one for taking them.
    """

    num_words: int  # 0: gaps of all lengths
    has_suffix: bool
    num_gaps: int
    exact: float
    first_word: float
    stated_keys: float = 0.0
    saved_keys: float = 0.0


class Gap(msgspec.Struct, frozen=True):
    """`text[start:end]` is missing."""

    text: str
    start: int
    end: int
    num_words: int


def choose_gaps(texts: Mapping[str, str], num_sentences: int, rng: random.Random) -> list[Gap]:
    """A gap of each length in each of `num_sentences` random sentences of each text; fewer if the text has fewer."""
    gaps = []
    for text in texts.values():
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
    console: Console,
) -> None:
    """Fill the document.

    Args:
        fields: fields of each request, as in `POST /autocomplete`.

    Raises:
        StartError: a request failed.
    """
    gaps = choose_gaps(texts, num_sentences, random.Random(options.seed))
    document.workload = {"num_sentences": num_sentences, "fields": {"n_samples": NUM_SUGGESTIONS, **fields}}
    matches: dict[tuple[bool, int], list[_Match]] = {}
    num_silent = 0
    latencies_ms: dict[bool, list[float]] = {False: [], True: []}
    with (
        gateway_source(options, document.workload["fields"], console) as source,
        progress(console, "Gaps", len(gaps)) as turn,
    ):
        for number, gap in enumerate(gaps):
            turn(f"{gap.num_words} words")
            context, wanted = trim_context(gap.text[: gap.start]), gap.text[gap.start : gap.end].split()
            after = gap.text[gap.end :].split("\n\n", 1)[0][:NUM_AFTER_CHARS]
            for has_suffix in (False, True):
                suffix = {"suffix": after} if has_suffix else {}
                answer = source.suggest(context, options.seed + SEEDS_APART * number, **suffix)
                found = _match(answer, wanted, is_whole=has_suffix)
                matches.setdefault((has_suffix, gap.num_words), []).append(found)
                latencies_ms[has_suffix].append(answer.latency_ms)
            whole = source.suggest(trim_context(gap.text[: gap.end]), options.seed + SEEDS_APART * number, suffix=after)
            num_silent += not whole.suggestions
    document.rows = list(_rows(matches))
    document.notes.append(f"Where nothing is missing, nothing is suggested in {num_silent} of {len(gaps)} places.")
    for has_suffix, name in ((False, "Without"), (True, "With")):
        document.notes.append(f"{name} the text after the gap: {describe_latencies(latencies_ms[has_suffix])}")


def gap_table(rows: Sequence[GapRow]) -> Table:
    table = Table("words", "gaps", title="Gaps that one of three suggestions fills")
    for heading in ("exact", "exact, with suffix", "first word", "first word, with suffix", "stated keys", "saved"):
        table.add_column(heading, justify="right")
    for without, with_suffix in zip(rows[::2], rows[1::2], strict=True):
        shares = (without.exact, with_suffix.exact, without.first_word, with_suffix.first_word)
        keys = with_suffix.stated_keys, with_suffix.saved_keys
        cells = (*(f"{share:.1%}" for share in shares), *(f"{each:.2f}" for each in keys))
        table.add_row(str(without.num_words or "all"), str(without.num_gaps), *cells)
    return table


class _Match(NamedTuple):
    exact: bool
    first_word: bool
    stated_keys: float
    saved_keys: float


def _rows(matches: Mapping[tuple[bool, int], Sequence[_Match]]) -> Iterator[GapRow]:
    for num_words in (*range(1, MAX_GAP_WORDS + 1), 0):
        for has_suffix in (False, True):
            lengths = [num_words] if num_words else range(1, MAX_GAP_WORDS + 1)
            own = [found for length in lengths for found in matches.get((has_suffix, length), ())]
            means = [round(sum(column) / max(1, len(own)), 4) for column in zip(*own, strict=True)] or [0.0] * 4
            columns = dict(zip(_Match._fields, means, strict=True))
            yield GapRow(num_words=num_words, has_suffix=has_suffix, num_gaps=len(own), **columns)


def _match(answer: Answer, wanted: Sequence[str], *, is_whole: bool) -> _Match:
    """Whether a suggestion has the missing words, and whether one has the first of them, without its punctuation."""
    suggestions = [text.split() for text in answer.suggestions]
    first = suggestions[0] if suggestions else []
    right = list(takewhile(lambda pair: pair[0] == pair[1], zip(first, wanted, strict=False)))
    saved_keys = max(0, len(" ".join(word for word, _ in right)) - 1)
    exact = any(words[: None if is_whole else len(wanted)] == wanted for words in suggestions)
    has_first_word = _first_word(wanted) in map(_first_word, suggestions)
    return _Match(exact, has_first_word, next(iter(answer.usefulness), 0.0), saved_keys)


def _first_word(words: Sequence[str]) -> str:
    found = _WORD.search(" ".join(words))
    return found[0] if found else ""


def _word_spans(sentence: re.Match[str]) -> list[tuple[int, int]]:
    start = sentence.start()
    return [(start + found.start(), start + found.end()) for found in re.finditer(r"\S+", sentence[0])]
