"""`tercet bench typist`: keystroke savings of a writer of prose unknown to the model, by several rules.

Requests suggestions where the simulated writers (`writers`) want them, and reports the savings next to anchors that
need no server.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

from deploy.bench.quality.keystrokes import Answer, SavingsRow, Usage, savings_row
from deploy.bench.quality.sources import SuggestionSource, engine_source, gateway_source
from deploy.bench.quality.writers import (
    KEY_INTERVAL_MS,
    PageWriter,
    Writer,
    write_by_literature,
    write_by_pause,
)
from deploy.load import plot
from deploy.load.local_engine import MAX_WRITERS
from deploy.load.options import Options
from deploy.load.passages import Passage, choose_passages
from deploy.load.report import Document
from deploy.load.rounds import percentile
from deploy.load.run import progress
from shared.errors import StartError

RULES = ("literature", "page", "pause")
TERCET = "tercet"
SEEDS_APART = 1000  # further than a request's branches and those that replace them
# What a contact centre's vendor published for a model fine-tuned on the centre's own chats.
PUBLISHED = "8 to 15 %, published for a model fine-tuned on one contact centre's chats"

# By rule and number of suggestions on show, for each passage.
_Usages: TypeAlias = dict[tuple[str, int], list[Usage]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypistOptions:
    """What is typed, and how.

    Attributes:
        num_passages: of each text.
        num_words, num_characters: length of each passage; `num_words` counts if `num_characters` is None.
        rules: a selection of `RULES`.
        num_samples: suggestions of each request, and on show at most.
        num_writers: writers who type at the same time, each another passage.
        min_usefulness: of the editor, by the rule page (`PageWriter`).
        latency_limit_ms: answers that take longer are not used.
        context_chars: of each request; None: as many as the editor sends.
        fields: of each request, as in `POST /autocomplete`.
        is_engine: use an engine in this process instead of a gateway; there are no latencies then.
    """

    num_passages: int
    num_words: int
    num_characters: int | None = None
    rules: Sequence[str] = RULES
    num_samples: int = 3
    num_writers: int = 1
    min_usefulness: float = 0.0
    latency_limit_ms: float | None = None
    context_chars: int | None = None
    fields: Mapping[str, Any]
    is_engine: bool = False

    @property
    def writers(self) -> dict[str, Writer]:
        """By rule."""
        all_writers: dict[str, Writer] = {
            "literature": write_by_literature,
            "page": PageWriter(self.min_usefulness),
            "pause": write_by_pause,
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
            texts: to type, by file name.
        """
        self._options, self._typist, self._texts, self._console = options, typist, texts, console

    def run(self, document: Document) -> None:
        typist = self._typist
        passages = choose_passages(
            self._texts, typist.num_passages, typist.num_words, random.Random(self._options.seed), typist.num_characters
        )
        document.workload = {
            "fields": self._fields,
            "passages": typist.num_passages,
            **({"characters": typist.num_characters} if typist.num_characters else {"words": typist.num_words}),
            "rules": list(typist.rules),
            "writers": self._num_writers,
            "min_usefulness": typist.min_usefulness,
            "latency_limit_ms": typist.latency_limit_ms,
            "context_chars": typist.context_chars,
        }
        usages, latencies_ms = self._type_with_tercet(passages)
        document.rows = list(self._rows(TERCET, passages, usages))
        document.notes += [
            f"For comparison: {PUBLISHED}.",
            *([] if typist.is_engine else [_describe_latencies(latencies_ms)]),
        ]

    @property
    def _fields(self) -> dict[str, Any]:
        return {"n_samples": self._typist.num_samples, **self._typist.fields}

    @property
    def _num_writers(self) -> int:
        return MAX_WRITERS if self._typist.is_engine else self._typist.num_writers

    def _type_with_tercet(self, passages: Sequence[Passage]) -> tuple[_Usages, list[float]]:
        """The usages, and the latencies of all requests in milliseconds."""
        usages: _Usages = {}
        latencies_ms: list[float] = []
        with ExitStack() as stack:
            source = stack.enter_context(
                engine_source(self._options, self._fields)
                if self._typist.is_engine
                else gateway_source(self._options, self._fields, self._console)
            )
            turn = stack.enter_context(progress(self._console, "Passages", len(passages)))
            pool = ThreadPoolExecutor(self._num_writers)
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
        self, source: SuggestionSource, is_over: threading.Event, passage: Passage, seeds: Mapping[int, int]
    ) -> tuple[dict[tuple[str, int], Usage], list[float]]:
        """Type a passage by all rules; no position is requested twice."""
        latencies_ms = []

        @cache
        def suggest(position: int) -> Answer:
            if is_over.is_set():
                raise StartError("The run was stopped.")
            answer = source.suggest(passage.context(position, self._typist.context_chars), seeds[position])
            latencies_ms.append(answer.latency_ms)
            limit_ms = self._typist.latency_limit_ms
            return answer if limit_ms is None or answer.latency_ms <= limit_ms else Answer(latency_ms=answer.latency_ms)

        found = {
            (rule, number): write(passage, suggest, number)
            for rule, write in self._typist.writers.items()
            for number in self._typist.numbers
        }
        return found, latencies_ms

    def _rows(self, suggester: str, passages: Sequence[Passage], usages: _Usages) -> Iterator[SavingsRow]:
        for file in [*self._texts, *(["all"] if len(self._texts) > 1 else [])]:
            own = [index for index, passage in enumerate(passages) if file in (passage.file, "all")]
            for (rule, number), found in usages.items():
                base = usages.get((rule, 1), []) if number > 1 else []
                yield savings_row(
                    file, rule, suggester, number,
                    [found[index] for index in own], [base[index] for index in own if base],
                )  # fmt: skip


def savings_table(rows: Sequence[SavingsRow]) -> Table:
    """A row for each text, rule and suggester, a column for each number of suggestions."""
    numbers = sorted({row.num_suggestions for row in rows})
    table = Table("text", "rule", "suggestions of", title="Keystroke savings (95 % confidence interval)")
    for number in numbers:
        table.add_column(f"{number} suggestion{'s' * (number > 1)}", justify="right")
    if len(numbers) > 1:
        table.add_column(f"{numbers[-1]} ÷ 1", justify="right")
    lines: dict[tuple[str, str, str], dict[int, SavingsRow]] = {}
    for row in rows:
        lines.setdefault((row.file, row.rule, row.suggester), {})[row.num_suggestions] = row
    files = list(dict.fromkeys(row.file for row in rows))
    for key, own in sorted(lines.items(), key=lambda line: (files.index(line[0][0]), RULES.index(line[0][1]))):
        cells = [_format(own[number].share, own[number].low, own[number].high) if number in own else ""
                 for number in numbers]  # fmt: skip
        last = own.get(numbers[-1])
        has_ratio = last is not None and last.ratio is not None
        ratio = f"{last.ratio:.2f} ({last.ratio_low:.2f}–{last.ratio_high:.2f})" if last and has_ratio else ""
        table.add_row(*key, *cells, *([ratio] if len(numbers) > 1 else []))
    return table


def usage_table(rows: Sequence[SavingsRow]) -> Table:
    """How the suggestions were used, over all texts and with the most suggestions on show."""
    table = Table("rule", "suggestions of", title="Use of suggestions")
    headings = ("shown at", "accepted", "characters accepted", "and kept", "words per acceptance", "flicker")
    for heading in headings:
        table.add_column(heading, justify="right")
    last = max(row.num_suggestions for row in rows)
    own = [row for row in rows if row.file == rows[-1].file and row.num_suggestions == last]
    for row in sorted(own, key=lambda row: RULES.index(row.rule)):
        shares = (row.shown, row.accepted, row.accepted_characters, row.kept_characters)
        words = "" if row.words_per_acceptance is None else f"{row.words_per_acceptance:.2f}"
        table.add_row(row.rule, row.suggester, *map(_percent, shares), words, _percent(row.flicker))
    return table


def plot_savings(document: Document, rows: Sequence[SavingsRow], path: Path) -> None:
    """A panel for each rule: for each text, bars by number of suggestions with their confidence intervals; a dashed
    line for each anchor."""
    from matplotlib.figure import Figure

    rules = [rule for rule in RULES if any(row.rule == rule for row in rows)]
    files = list(dict.fromkeys(row.file for row in rows))
    figure = Figure(figsize=(4 + 4 * len(rules), 4.5), layout="constrained")
    for axis, rule in zip(figure.subplots(1, len(rules), sharey=True, squeeze=False)[0], rules, strict=True):
        bars = [row for row in rows if row.rule == rule and row.suggester == TERCET]
        numbers = sorted({row.num_suggestions for row in bars})
        for number in numbers:
            own = [row for row in bars if row.num_suggestions == number]
            positions = [files.index(row.file) + 0.25 * (number - (len(numbers) + 1) / 2) for row in own]
            errors = [[row.share - row.low for row in own], [row.high - row.share for row in own]]
            axis.bar(positions, [row.share for row in own], 0.22, yerr=errors, label=f"{number} shown", capsize=2)
        anchors = {row.suggester: row.share for row in rows
                   if row.rule == rule and row.suggester != TERCET and row.file == files[-1]}  # fmt: skip
        for number, (name, share) in enumerate(anchors.items(), len(numbers)):
            axis.axhline(share, linestyle="--", linewidth=1, color=f"C{number}", label=f"{name}, {files[-1]}")
        axis.set_xticks(range(len(files)), [file.removesuffix(".txt") for file in files], rotation=15, fontsize=8)
        axis.set_title(f"rule: {rule}", fontsize=9)
        axis.set_ylabel("keystroke savings")
        axis.legend(fontsize=8, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    plot.save(figure, document, path)


def _seeds(passages: Sequence[Passage]) -> list[dict[int, int]]:
    """For each passage, the seed of the request at each of its positions. Starts of words are numbered first, so that
    the rule of pauses has the same requests with and without the other rules."""
    number = 0
    found: list[dict[int, int]] = [{} for _ in passages]
    for positions in (lambda passage: passage.positions, lambda passage: range(passage.start, passage.end)):
        for seeds, passage in zip(found, passages, strict=True):
            for position in positions(passage):
                if position not in seeds:
                    seeds[position] = SEEDS_APART * number
                    number += 1
    return found


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
