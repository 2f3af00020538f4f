"""`tercet bench typist`: the share of keystrokes that suggestions save a writer of prose unknown to the model.

Requests suggestions at every word and reports the savings; `keystrokes` simulates the writer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.bench.harness import plot
from deploy.bench.harness.options import Options
from deploy.bench.harness.report import Document
from deploy.bench.harness.rounds import percentile
from deploy.bench.harness.run import progress
from deploy.bench.quality.keystrokes import KeystrokeSavings, Passage, choose_passages, keystroke_savings
from deploy.bench.quality.sources import BATCH, engine_source, gateway_source

MAX_SUGGESTIONS = 3
BUDGETS_MS = (50.0, 100.0, 200.0, float("inf"))
SEEDS_APART = 1000  # further than a request's branches and those that replace them
# What a contact centre's vendor published for a model fine-tuned on the centre's own chats.
PUBLISHED = "8 to 15 %, published for a model fine-tuned on one contact centre's chats"


class TypistBench:
    """One run. `run` fills the document."""

    def __init__(
        self, options: Options, texts: Mapping[str, str], num_passages: int, num_words: int,
        fields: Mapping[str, Any], console: Console, *, is_engine: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            texts: by file name.
            num_passages: of each text.
            num_words: of each passage.
            fields: of each request, as in `POST /autocomplete`.
            is_engine: use an engine in this process instead of a gateway; there are no latencies then.
        """
        self._options, self._texts = options, texts
        self._num_passages, self._num_words = num_passages, num_words
        self._fields, self._console, self._is_engine = fields, console, is_engine

    def run(self, document: Document) -> None:
        passages = choose_passages(self._texts, self._num_passages, self._num_words, random.Random(self._options.seed))
        self._request_suggestions(passages)
        budgets = BUDGETS_MS[-1:] if self._is_engine else BUDGETS_MS
        files = [*self._texts, *(["all"] if len(self._texts) > 1 else [])]
        document.workload = {"fields": dict(self._fields), "passages": self._num_passages, "words": self._num_words}
        document.rows = [
            keystroke_savings([passage for passage in passages if file in (passage.file, "all")], file, number, budget)
            for file in files
            for budget in reversed(budgets)
            for number in range(1, MAX_SUGGESTIONS + 1)
        ]
        document.notes += [f"For comparison: {PUBLISHED}.", *([] if self._is_engine else [_latencies(passages)])]

    def _request_suggestions(self, passages: Sequence[Passage]) -> None:
        """Suggestions and latencies at all positions, into the passages."""
        places = [(passage, position) for passage in passages for position in passage.positions]
        size = BATCH if self._is_engine else 1
        batches = [places[first : first + size] for first in range(0, len(places), size)]
        with ExitStack() as stack:
            source = stack.enter_context(
                engine_source(self._options, self._fields)
                if self._is_engine
                else gateway_source(self._options, self._fields, self._console)
            )
            turn = stack.enter_context(progress(self._console, "Typing", len(batches)))
            for number, batch in enumerate(batches):
                turn(batch[0][0].file)
                seeds = [SEEDS_APART * (number * size + index) for index in range(len(batch))]
                answers = source.suggest([passage.context(position) for passage, position in batch], seeds)
                for (passage, position), (sentences, ms) in zip(batch, answers, strict=True):
                    passage.suggestions[position], passage.latency_ms[position] = sentences, ms


def savings_table(rows: Sequence[KeystrokeSavings]) -> Table:
    """A row for each text and latency budget, a column for each number of suggestions."""
    table = Table("text", "latency budget", title="Keystroke savings (95 % confidence interval)")
    for number in range(1, MAX_SUGGESTIONS + 1):
        table.add_column(f"{number} suggestion{'s' * (number > 1)}", justify="right")
    lines: dict[tuple[str, float | None], list[str]] = {}
    for row in rows:
        values = lines.setdefault((row.file, row.budget_ms), [])
        values.append(f"{row.share:.1%} ({row.low:.1%}–{row.high:.1%})")
    for (file, budget_ms), values in lines.items():
        table.add_row(file, "none" if budget_ms is None else f"{budget_ms:.0f} ms", *values)
    return table


def plot_savings(document: Document, rows: Sequence[KeystrokeSavings], path: Path) -> None:
    """For each text, bars by number of suggestions with their confidence intervals; without a latency budget."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.budget_ms is None]
    files = list(dict.fromkeys(row.file for row in shown))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    for number in sorted({row.num_suggestions for row in shown}):
        own = [row for row in shown if row.num_suggestions == number]
        positions = [files.index(row.file) + 0.25 * (number - 2) for row in own]
        errors = [[row.share - row.low for row in own], [row.high - row.share for row in own]]
        axis.bar(positions, [row.share for row in own], 0.22, yerr=errors, label=f"{number} shown", capsize=2)
    axis.set_xticks(range(len(files)), files)
    axis.set_ylabel("keystroke savings")
    axis.legend()
    plot.save(figure, document, path)


def _latencies(passages: Sequence[Passage]) -> str:
    all_ms = [ms for passage in passages for ms in passage.latency_ms.values()]
    percentiles = ", ".join(f"p{100 * share:.0f} {percentile(all_ms, share):.0f} ms" for share in (0.5, 0.9, 0.99))
    return f"{len(all_ms)} requests: {percentiles}."
