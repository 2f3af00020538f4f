"""The options of a benchmark, validated once and passed down, and the document of its run.

Does not know which benchmarks exist.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from deploy.terminal import labelled
from deploy.tuning.load.run import Document, print_notes
from deploy.tuning.load.workload import W, Workload
from shared.errors import StartError
from shared.settings import Settings
from tests.bench.results import Row, err, tables
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
    rows: list[Row] = msgspec.field(default_factory=list)
    not_measured: dict[str, str] = msgspec.field(default_factory=dict)


def print_document(document: BenchDocument) -> None:
    """The figures, what was not measured and why, the notes, and how far the figures can be trusted."""
    for found in (*tables([series.row for series in document.series.values()]), *tables(document.rows)):
        err.print(found)
    reasons = document.not_measured
    for why in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, reason in reasons.items() if reason == why)
        err.print(labelled("Not measured:", "yellow", f"{names}: {why}"))
    print_notes(err, document)


def names_of(noun: str, names: Collection[str]) -> Callable[[str], list[str]]:
    """What an option reads that lists some of these names, separated by commas: those, in the order of `names`."""

    def read(text: str) -> list[str]:
        chosen = {name for name in text.split(",") if name}
        if unknown := chosen.difference(names):
            raise ArgumentTypeError(f"{min(unknown)} is not a {noun}; use {', '.join(names)}")
        return [name for name in names if name in chosen]

    return read
