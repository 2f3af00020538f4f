"""The options of a benchmark, validated once and passed down, and its output.

Tables and reasons go to standard error, one JSON document last to standard output. Does not know which benchmarks
exist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.load.run import Document, print_notes
from deploy.load.workload import W, Workload
from deploy.terminal import labelled
from shared.errors import StartError
from shared.settings import Settings
from tests.bench.rounds import Series
from workers.checkpoints.resolve import Checkpoint, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured, and how often."""

    models: str = "synthetic:small"  # a value of TERCET_MODELS with one entry
    device: str = "cpu"  # cpu, or cuda for the first GPU
    num_rounds: int = 7
    is_quick: bool = False
    seed: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)  # further settings by lower-case name
    workload: Workload = W

    @property
    def server_settings(self) -> dict[str, str]:
        """The settings of the server under test, except its models."""
        return {"devices": "cpu" if self.device == "cpu" else "cuda:0", **self.settings}

    def load_settings(self) -> Settings:
        """The settings as the server under test loads them.

        Raises:
            StartError: a setting is invalid, or the settings describe more than one worker.
        """
        values = {"models": self.models, **self.server_settings}
        loaded = Settings.load({f"TERCET_{name.upper()}": value for name, value in values.items()})
        if len(loaded.model.models) != 1 or loaded.model.models[0].count != 1 or len(loaded.pool.devices) != 1:
            raise StartError("A benchmark measures one worker: name one model, without a count, and one device.")
        return loaded

    @property
    def num_threads(self) -> int:
        """Compute threads of the only worker on this machine."""
        return self.load_settings().pool.cpu_threads or len(os.sched_getaffinity(0))

    def subject(self) -> Checkpoint:
        """The model under test.

        Raises:
            StartError: the model is not on this machine and cannot be downloaded.
        """
        [spec] = self.load_settings().model.models
        return resolve(spec.name, spec.source)


class BenchDocument(Document, kw_only=True):
    """The result of one benchmark."""

    ceiling: dict[str, Any] = msgspec.field(default_factory=dict)
    series: dict[str, Series] = msgspec.field(default_factory=dict)
    rows: list[Any] = msgspec.field(default_factory=list)
    not_measured: dict[str, str] = msgspec.field(default_factory=dict)


def print_reasons(console: Console, document: BenchDocument) -> None:
    """What was not measured and why, the notes, and how far the figures can be trusted."""
    reasons = document.not_measured
    for why in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, reason in reasons.items() if reason == why)
        console.print(labelled("Not measured:", "yellow", f"{names}: {why}"))
    print_notes(console, document)


def format_number(value: float | None) -> str:
    """Three significant digits; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def series_table(all_series: Sequence[Series], reference: Series | None) -> Table:
    """Median and spread of each series; with a reference, its ratio to the reference's median."""
    table = Table("series", "median", "min", "max", "n", title="Measured")
    if reference is not None:
        table.add_column(f"÷ {reference.label}")
    for column in table.columns[1:]:
        column.justify = "right"
    for series in all_series:
        values = [
            f"{format_number(series.median)} {series.unit}",
            format_number(series.min),
            format_number(series.max),
            str(len(series.samples)),
        ]
        if reference is not None:
            is_same_unit = series.unit == reference.unit
            values.append(f"{format_number(series.median / reference.median)}×" if is_same_unit else "")
        table.add_row(series.label, *values)
    return table
