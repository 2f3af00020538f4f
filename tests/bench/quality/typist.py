"""`typist`: keystroke savings of a writer of prose unknown to the model, by several rules.

Requests suggestions where the simulated writers (`writers`) want them.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from deploy.load.options import Options
from deploy.load.passages import Passage, choose_passages
from deploy.load.report import Document
from deploy.load.rounds import percentile
from deploy.load.run import progress
from shared.errors import StartError
from tests.bench.quality.keystrokes import Answer, SavingsRow, Usage, savings_row
from tests.bench.quality.suggestions import SEEDS_APART, GatewaySource, gateway_source
from tests.bench.quality.writers import (
    KEY_INTERVAL_MS,
    PageWriter,
    Writer,
    write_by_literature,
)

RULES = ("literature", "page")
# What a contact centre's vendor published for a model fine-tuned on the centre's own chats.
PUBLISHED = "8 to 15 %, published for a model fine-tuned on one contact centre's chats"

# Results by rule and number of suggestions on show, for each passage.
_Usages: TypeAlias = dict[tuple[str, int], list[Usage]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypistOptions:
    """What is typed, and how.

    Attributes:
        num_passages: number of passages of each text.
        num_words: length of each passage.
        rules: a selection of `RULES`.
        num_samples: suggestions of each request, and on show at most.
        num_writers: writers who type at the same time, each another passage.
        min_usefulness: the editor's threshold, by the rule page (`PageWriter`).
        context_chars: characters of each request's context. None for as many as the editor sends.
        fields: fields of each request, as in `POST /autocomplete`.
    """

    num_passages: int
    num_words: int
    rules: Sequence[str] = RULES
    num_samples: int = 3
    num_writers: int = 1
    min_usefulness: float = 0.0
    context_chars: int | None = None
    fields: Mapping[str, Any]

    @property
    def writers(self) -> dict[str, Writer]:
        """Results by rule."""
        all_writers: dict[str, Writer] = {
            "literature": write_by_literature,
            "page": PageWriter(self.min_usefulness),
        }
        return {rule: all_writers[rule] for rule in self.rules}

    @property
    def numbers(self) -> range:
        """Numbers of suggestions on show."""
        return range(1, self.num_samples + 1)


class TypistBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, typist: TypistOptions, texts: Mapping[str, str], console: Console) -> None:
        """
        Args:
            texts: texts to type, by file name.
        """
        self._options, self._typist, self._texts, self._console = options, typist, texts, console

    def run(self, document: Document) -> None:
        typist = self._typist
        passages = choose_passages(
            self._texts, typist.num_passages, typist.num_words, random.Random(self._options.seed)
        )
        document.workload = {
            "fields": self._fields,
            "passages": typist.num_passages,
            "words": typist.num_words,
            "rules": list(typist.rules),
            "writers": self._typist.num_writers,
            "min_usefulness": typist.min_usefulness,
            "context_chars": typist.context_chars,
        }
        usages, latencies_ms = self._type_with_tercet(passages)
        document.rows = list(self._rows(passages, usages))
        document.notes += [f"For comparison: {PUBLISHED}.", _describe_latencies(latencies_ms)]

    @property
    def _fields(self) -> dict[str, Any]:
        return {"n_samples": self._typist.num_samples, **self._typist.fields}

    def _type_with_tercet(self, passages: Sequence[Passage]) -> tuple[_Usages, list[float]]:
        """The usages, and the latencies of all requests in milliseconds."""
        usages: _Usages = {}
        latencies_ms: list[float] = []
        with ExitStack() as stack:
            source = stack.enter_context(gateway_source(self._options, self._fields, self._console))
            turn = stack.enter_context(progress(self._console, "Passages", len(passages)))
            pool = ThreadPoolExecutor(self._typist.num_writers)
            stack.callback(pool.shutdown, cancel_futures=True)
            is_over = threading.Event()  # after Ctrl-C or a failed request, no writer sends another
            stack.callback(is_over.set)
            done = pool.map(partial(self._type, source, is_over), passages, _seeds(passages))
            for passage in passages:
                turn(passage.file)
                found, passage_latencies_ms = next(done)
                for key, usage in found.items():
                    usages.setdefault(key, []).append(usage)
                latencies_ms += passage_latencies_ms
        return usages, latencies_ms

    def _type(
        self, source: GatewaySource, is_over: threading.Event, passage: Passage, seeds: Mapping[int, int]
    ) -> tuple[dict[tuple[str, int], Usage], list[float]]:
        """Type a passage by all rules; no position is requested twice."""
        latencies_ms = []

        @cache
        def suggest(position: int) -> Answer:
            if is_over.is_set():
                raise StartError("The run was stopped.")
            answer = source.suggest(passage.context(position, self._typist.context_chars), seeds[position])
            latencies_ms.append(answer.latency_ms)
            return answer

        found = {
            (rule, number): write(passage, suggest, number)
            for rule, write in self._typist.writers.items()
            for number in self._typist.numbers
        }
        return found, latencies_ms

    def _rows(self, passages: Sequence[Passage], usages: _Usages) -> Iterator[SavingsRow]:
        for file in [*self._texts, *(["all"] if len(self._texts) > 1 else [])]:
            own = [index for index, passage in enumerate(passages) if file in (passage.file, "all")]
            for (rule, number), found in usages.items():
                yield savings_row(file, rule, number, [found[index] for index in own])


def savings_table(rows: Sequence[SavingsRow]) -> Table:
    """A row for each text and rule, a column for each number of suggestions."""
    numbers = sorted({row.num_suggestions for row in rows})
    table = Table("text", "rule", title="Keystroke savings (95 % confidence interval)")
    for number in numbers:
        table.add_column(f"{number} suggestion{'s' * (number > 1)}", justify="right")
    lines: dict[tuple[str, str], dict[int, SavingsRow]] = {}
    for row in rows:
        lines.setdefault((row.file, row.rule), {})[row.num_suggestions] = row
    files = list(dict.fromkeys(row.file for row in rows))
    for key, own in sorted(lines.items(), key=lambda line: (files.index(line[0][0]), RULES.index(line[0][1]))):
        cells = [
            _format(own[number].share, own[number].low, own[number].high) if number in own else "" for number in numbers
        ]
        table.add_row(*key, *cells)
    return table


def usage_table(rows: Sequence[SavingsRow]) -> Table:
    """How the suggestions were used, over all texts and with the most suggestions on show."""
    table = Table("rule", title="Use of suggestions")
    headings = ("shown at", "accepted", "characters accepted", "and kept", "words per acceptance", "flicker")
    for heading in headings:
        table.add_column(heading, justify="right")
    last = max(row.num_suggestions for row in rows)
    own = [row for row in rows if row.file == rows[-1].file and row.num_suggestions == last]
    for row in sorted(own, key=lambda row: RULES.index(row.rule)):
        shares = (row.shown, row.accepted, row.accepted_characters, row.kept_characters)
        words = "" if row.words_per_acceptance is None else f"{row.words_per_acceptance:.2f}"
        table.add_row(row.rule, *map(_percent, shares), words, _percent(row.flicker))
    return table


def _seeds(passages: Sequence[Passage]) -> list[dict[int, int]]:
    """Return the seed of the request at each position of each passage."""
    numbers = itertools.count()
    return [
        {position: SEEDS_APART * next(numbers) for position in range(passage.start, passage.end)}
        for passage in passages
    ]


def _describe_latencies(latencies_ms: Sequence[float]) -> str:
    percentiles = ", ".join(
        f"p{100 * share:.0f} {percentile(latencies_ms, share):.0f} ms" for share in (0.5, 0.9, 0.99)
    )
    late = sum(ms > KEY_INTERVAL_MS for ms in latencies_ms) / len(latencies_ms)
    return f"{len(latencies_ms)} requests: {percentiles}; {late:.1%} arrived after the writer's next key."


def _format(share: float, low: float, high: float) -> str:
    return f"{share:.1%} ({low:.1%}–{high:.1%})"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
