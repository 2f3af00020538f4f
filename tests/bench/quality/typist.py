"""`typist`: keystroke savings of a writer of prose unknown to the model, by several rules.

Requests suggestions where the simulated writers (`writers`) want them.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from deploy.load.passages import Passage, choose_passages
from deploy.load.run import progress
from shared.errors import StartError
from tests.bench.quality.keystrokes import Answer, SavingsRow, Usage, savings_row
from tests.bench.quality.suggestions import SEEDS_APART, GatewaySource, gateway_source
from tests.bench.quality.writers import KEY_INTERVAL_MS, PageWriter, Writer, write_by_literature
from tests.bench.rounds import percentile
from tests.bench.run import BenchDocument, Options

RULES = ("literature", "page")
PUBLISHED = "For comparison: 8 to 15 %, published for a model fine-tuned on one contact centre's chats."

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
        all_writers: dict[str, Writer] = {"literature": write_by_literature, "page": PageWriter(self.min_usefulness)}
        return {rule: all_writers[rule] for rule in self.rules}


class TypistBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, typist: TypistOptions, texts: Mapping[str, str], console: Console) -> None:
        """
        Args:
            texts: texts to type, by file name.
        """
        self._options, self._typist, self._texts, self._console = options, typist, texts, console

    def run(self, document: BenchDocument) -> None:
        typist = self._typist
        rng = random.Random(self._options.seed)
        passages = choose_passages(self._texts, typist.num_passages, typist.num_words, rng)
        document.workload = {**asdict(typist), "fields": self._fields}
        usages, latencies_ms = self._type_with_tercet(passages)
        document.rows = list(self._rows(passages, usages))
        document.notes += [PUBLISHED, _describe_latencies(latencies_ms)]

    @property
    def _fields(self) -> dict[str, Any]:
        return {"n_samples": self._typist.num_samples, **self._typist.fields}

    def _type_with_tercet(self, passages: Sequence[Passage]) -> tuple[_Usages, list[float]]:
        """The usages, and the latencies of all requests in milliseconds."""
        usages: _Usages = {}
        latencies_ms: list[float] = []
        is_over = threading.Event()  # after Ctrl-C or a failed request, no writer sends another
        with (
            gateway_source(self._options, self._fields, self._console) as source,
            progress(self._console, "Passages", len(passages)) as turn,
            ThreadPoolExecutor(self._typist.num_writers) as pool,
        ):
            done = pool.map(partial(self._type, source, is_over), passages, _seeds(passages))
            try:
                for passage, (found, passage_latencies_ms) in zip(passages, done, strict=True):
                    turn(passage.file)
                    for key, usage in found.items():
                        usages.setdefault(key, []).append(usage)
                    latencies_ms += passage_latencies_ms
            finally:
                is_over.set()
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
            for number in range(1, self._typist.num_samples + 1)
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
        cells = (f"{row.share:.1%} ({row.low:.1%}–{row.high:.1%})" for row in own.values())
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
        use = row.usage
        table.add_row(
            row.rule,
            _share(use.num_moments_shown, use.num_moments),
            _share(use.num_accepted, use.num_moments_shown),
            _share(use.num_accepted_characters, use.num_characters),
            _share(use.num_kept_characters, use.num_characters),
            f"{use.num_accepted_words / max(1, use.num_accepted):.2f}",
            _share(use.num_replaced, use.num_holding),
        )
    return table


def _seeds(passages: Sequence[Passage]) -> list[dict[int, int]]:
    """Return the seed of the request at each position of each passage."""
    numbers = itertools.count()
    return [
        {position: SEEDS_APART * next(numbers) for position in range(passage.start, passage.end)}
        for passage in passages
    ]


def _describe_latencies(latencies_ms: Sequence[float]) -> str:
    percentiles = ", ".join(f"p{share} {percentile(latencies_ms, share / 100):.0f} ms" for share in (50, 90, 99))
    late = sum(ms > KEY_INTERVAL_MS for ms in latencies_ms) / len(latencies_ms)
    return f"{len(latencies_ms)} requests: {percentiles}; {late:.1%} arrived after the writer's next key."


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""
