"""`tercet bench cache`: what longer windows, and an n-gram cache of the text before, bring to the model's predictions.

The figure is bits per character: −log2 of the probabilities of a passage's own tokens, divided by its characters. Each
word is scored after the prompt of a request at its start. Knows texts, token ids and their probabilities. Does not know
how the model is run (`prompt_scorer`), suggestions and the gateway.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.quality.keystrokes import NUM_RESAMPLES
from deploy.bench.quality.ngram_cache import Frequency, NgramIndex, Weight, mix
from deploy.bench.quality.prompt_scorer import PromptScorer
from deploy.load.options import Options
from deploy.load.passages import Passage, choose_passages, trim_context
from deploy.load.report import Document, format_number
from deploy.load.rounds import percentile
from deploy.load.run import progress
from workers.text.tokenizer import Tokenizer
from workers.text.window import encode_window

WINDOWS = (128, 256, 512, 768)  # tokens
BASE_WINDOW = 256  # as in requests that name none; the cache is mixed into it, and differences are to it
# What the cache counts in: a part of the text before the passage.
HISTORIES: dict[str, Callable[[str], str]] = {
    "sent by the editor": trim_context,
    "65,536 characters": lambda before: before[-65_536:],
    "all of the book": str,
}
# Weights of contexts of 0 to 3 tokens. The first was the best of six in an earlier study of other passages.
MIXTURES = {
    "caps 2, 5, 15, 30 %": (Weight(0.02, 1), Weight(0.05, 3), Weight(0.15, 2), Weight(0.3, 2)),
    "half of these": (Weight(0.01, 1), Weight(0.025, 3), Weight(0.075, 2), Weight(0.15, 2)),
    "twice these": (Weight(0.04, 1), Weight(0.1, 3), Weight(0.3, 2), Weight(0.6, 2)),
    "after 2 and 3 tokens only": (Weight(0, 1), Weight(0, 3), Weight(0.15, 2), Weight(0.3, 2)),
}
NO_CACHE = ""


class IndexCost(msgspec.Struct, frozen=True, kw_only=True):
    """What an `NgramIndex` costs in Python, in the median over passages.

    Attributes:
        encode_ms, count_ms: to encode and to count 1,000 characters of text, when the index is built.
        bytes_per_token: of the counted text, when the index is built.
        key_us: for each character typed after that: encoding each word once more, and counting its tokens.
    """

    encode_ms: float
    count_ms: float
    bytes_per_token: float
    key_us: float


class CacheRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bits per character of all passages with one setting.

    Attributes:
        history, mixture: keys of `HISTORIES` and `MIXTURES`; empty without a cache.
        change: relative to the base window without a cache; below zero is better.
        low, high: 95 % confidence interval of `change`; the passages are resampled in pairs.
        prefill_ms: of the window without cached keys and values, in the median; None with a cache.
        index: None without a cache.
    """

    window_tokens: int
    history: str = NO_CACHE
    mixture: str = NO_CACHE
    bits_per_character: float
    change: float
    low: float
    high: float
    prefill_ms: float | None = None
    index: IndexCost | None = None


@dataclass(frozen=True, slots=True)
class PassageScores:
    """One passage with all settings.

    Attributes:
        bits: of the passage, by window and keys of `HISTORIES` and `MIXTURES`.
        prefill_ms: by window.
        index: by key of `HISTORIES`.
    """

    num_characters: int
    bits: dict[tuple[int, str, str], float]
    prefill_ms: dict[int, float]
    index: dict[str, IndexCost]


class CacheBench:
    """One run. `run` fills the document."""

    def __init__(
        self, options: Options, texts: Mapping[str, str], num_passages: int, num_words: int, console: Console
    ) -> None:
        """
        Args:
            texts: unknown to the model, by file name.
            num_passages: of each text.
            num_words: length of each passage.
        """
        self._options, self._texts, self._console = options, texts, console
        self._num_passages, self._num_words = num_passages, num_words

    def run(self, document: Document) -> None:
        """
        Raises:
            StartError: the model cannot be loaded, or a window does not fit into its context.
        """
        rng = random.Random(self._options.seed)
        passages = choose_passages(self._texts, self._num_passages, self._num_words, rng)
        document.workload = {
            "texts": list(self._texts),
            "passages": self._num_passages,
            "words": self._num_words,
            "mixtures": {name: [weight._asdict() for weight in weights] for name, weights in MIXTURES.items()},
        }
        scorer = PromptScorer(self._options)
        scores = []
        with progress(self._console, "Passages", len(passages)) as turn:
            for passage in passages:
                turn(passage.file)
                scores.append(score_passage(passage, scorer))
        document.rows = cache_rows(scores)


def score_passage(passage: Passage, scorer: PromptScorer) -> PassageScores:
    """
    Raises:
        StartError: a window does not fit into the model's context.
    """
    words = passage_words(passage)
    encode = scorer.tokenizer.encode
    bits: dict[tuple[int, str, str], float] = {}
    prefill_ms = {}
    base_logprobs: list[float] = []
    for window in WINDOWS:
        runs = window_runs(passage, window, scorer.tokenizer)
        logprobs = [logprob for prompt_ids, token_ids in runs for logprob in scorer.logprobs(prompt_ids, token_ids)]
        bits[window, NO_CACHE, NO_CACHE] = -sum(logprobs) / math.log(2)
        prefill_ms[window] = scorer.prefill_ms(runs[0][0])
        if window == BASE_WINDOW:
            base_logprobs = logprobs
    index_costs = {}
    for history, cut in HISTORIES.items():
        frequencies, index_costs[history] = count_history(cut(passage.text[: passage.start - 1]), words, encode)
        for mixture, weights in MIXTURES.items():
            bits[BASE_WINDOW, history, mixture] = -sum(
                math.log2(mix(math.exp(logprob), found, weights))
                for logprob, found in zip(base_logprobs, frequencies, strict=True)
            )
    return PassageScores(sum(map(len, words)), bits, prefill_ms, index_costs)


def window_runs(passage: Passage, window: int, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """The passage as runs of (prompt, tokens that follow it), because the start of the window moves only now and then.

    Each word's tokens follow the prompt that a request at the word's start has, `window` tokens at most; token healing
    leaves out the space before the word.
    """
    runs: list[tuple[list[int], list[int]]] = []
    for start, word in zip(passage.positions, passage_words(passage), strict=True):
        prompt_ids = encode_window(trim_context(passage.text[: start - 1]), window, tokenizer.encode_with_starts)
        if not runs or runs[-1][0] + runs[-1][1] != prompt_ids:
            runs.append((prompt_ids, []))
        runs[-1][1].extend(tokenizer.encode(word))
    return runs


def passage_words(passage: Passage) -> list[str]:
    """The passage word by word, each with the white space before it, which the tokenizer joins with the word.

    Together they are the passage's text, shifted by one character.
    """
    bounds = [start - 1 for start in (*passage.positions, passage.end)]
    return [passage.text[start:end] for start, end in pairwise(bounds)]


def count_history(
    history: str, words: Sequence[str], encode: Callable[[str], list[int]]
) -> tuple[list[list[Frequency]], IndexCost]:
    """Index a text, then add words to it. Returns the frequencies of each token of the words, before it was added, and
    what the index cost."""
    begin = time.perf_counter()
    token_ids = encode(history)
    encoded = time.perf_counter()
    index = NgramIndex()
    index.extend(token_ids)
    built = time.perf_counter()
    num_bytes = index.num_bytes()
    frequencies = []
    typing_s = 0.0
    for word in words:
        typed = time.perf_counter()
        word_ids = encode(word)
        typing_s += time.perf_counter() - typed
        for token_id in word_ids:
            frequencies.append(index.frequencies(token_id))
            found = time.perf_counter()
            index.extend([token_id])
            typing_s += time.perf_counter() - found
    return frequencies, IndexCost(
        encode_ms=1e6 * (encoded - begin) / len(history),
        count_ms=1e6 * (built - encoded) / len(history),
        bytes_per_token=num_bytes / len(token_ids),
        key_us=1e6 * typing_s / sum(map(len, words)),
    )


def cache_rows(scores: Sequence[PassageScores]) -> list[CacheRow]:
    """A row for each setting; costs are rounded medians."""
    return [_row(scores, *setting) for setting in scores[0].bits]


def _row(scores: Sequence[PassageScores], window: int, history: str, mixture: str) -> CacheRow:
    pairs = [(each.bits[window, history, mixture], each.bits[BASE_WINDOW, NO_CACHE, NO_CACHE]) for each in scores]
    rng = random.Random(0)
    changes = [_change(rng.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES)]
    return CacheRow(
        window_tokens=window,
        history=history,
        mixture=mixture,
        bits_per_character=round(sum(bits for bits, _ in pairs) / sum(each.num_characters for each in scores), 4),
        change=round(_change(pairs), 4),
        low=round(percentile(changes, 0.025), 4),
        high=round(percentile(changes, 0.975), 4),
        prefill_ms=None if history else round(statistics.median(each.prefill_ms[window] for each in scores), 2),
        index=_median_cost([each.index[history] for each in scores]) if history else None,
    )


def _change(pairs: Sequence[tuple[float, float]]) -> float:
    """From the bits and the base's bits of each passage."""
    return sum(bits for bits, _ in pairs) / sum(base for _, base in pairs) - 1


def _median_cost(costs: Sequence[IndexCost]) -> IndexCost:
    return IndexCost(
        encode_ms=round(statistics.median(cost.encode_ms for cost in costs), 3),
        count_ms=round(statistics.median(cost.count_ms for cost in costs), 3),
        bytes_per_token=round(statistics.median(cost.bytes_per_token for cost in costs)),
        key_us=round(statistics.median(cost.key_us for cost in costs), 2),
    )


def cache_table(rows: Sequence[CacheRow]) -> Table:
    """A row for each setting. An index's cost (to encode and to count, memory, per key) is printed once, with its first
    mixture."""
    table = Table("window", "cache of the text", "mixture", title="The document's own words")
    for heading in ("bits per character", "difference (95 %)", "cost"):
        table.add_column(heading, justify="right")
    previous = NO_CACHE
    for row in rows:
        change = f"{row.change:+.1%} ({row.low:+.1%} to {row.high:+.1%})"
        is_base = row.window_tokens == BASE_WINDOW and not row.history
        table.add_row(
            str(row.window_tokens), row.history, row.mixture, f"{row.bits_per_character:.4f}",
            "" if is_base else change, "" if row.history and row.history == previous else _describe_cost(row),
        )  # fmt: skip
        previous = row.history
    return table


def _describe_cost(row: CacheRow) -> str:
    if row.index is None:
        return f"prefill {format_number(row.prefill_ms)} ms"
    index = row.index
    return (
        f"{format_number(index.encode_ms)} + {format_number(index.count_ms)} ms per 1,000 characters,\n"
        f"{index.bytes_per_token:.0f} bytes per token, {format_number(index.key_us)} µs per key"
    )
