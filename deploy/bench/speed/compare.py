"""This checkout against another one: the same benchmark in both, in turns, on one machine.

Runs `tercet bench engine` of each checkout as a child process, so that each version is measured by its own code.
Machines drift, so versions take turns round by round and medians are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import track
from rich.table import Table

from deploy.bench.harness.server import ROOT
from shared.errors import StartError

# Rows of `tercet bench engine` that need no baseline.
ROWS = ("overhead", "clients", "embedded", "start")
# Series of those rows that are compared: whether more is better.
SERIES = {"gateway": False, "gateway-overhead": False, "clients": True, "embedded": False, "start": False}
MAX_RUN_S = 900.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over the rounds. `ratio` is this checkout's figure divided by the other's."""

    label: str
    unit: str
    ours: float
    other: float
    more_is_better: bool

    @property
    def ratio(self) -> float:
        return self.ours / self.other


def compare(other: Path, rounds: int, rows: Sequence[str] = ROWS) -> tuple[list[Comparison], list[dict[str, Any]]]:
    """Run both checkouts in turns; also the values of each round.

    Args:
        other: the root of another checkout, at any commit that has these rows.

    Raises:
        StartError: a run failed; its last lines are quoted.
    """
    values: dict[str, dict[str, list[float]]] = {"ours": {}, "other": {}}
    labels: dict[str, tuple[str, str]] = {}
    per_round = []
    for number in track(range(rounds), description="Rounds"):
        # The second run of a round finds warm file caches and a warm CPU: alternate which version that is.
        order = [("ours", ROOT), ("other", other)]
        found: dict[str, dict[str, float]] = {}
        for name, root in order if number % 2 == 0 else reversed(order):
            found[name] = {}
            for key, label, unit, samples in _run(root, rows, seed=number):
                values[name].setdefault(key, []).extend(samples)
                found[name][key] = median(samples)
                labels.setdefault(key, (label, unit))
        per_round.append({"round": number, **found})
    shared = [key for key in SERIES if key in values["ours"] and key in values["other"]]
    return [
        Comparison(*labels[key], median(values["ours"][key]), median(values["other"][key]), SERIES[key])
        for key in shared
    ], per_round


def _run(root: Path, rows: Sequence[str], seed: int) -> Iterator[tuple[str, str, str, list[float]]]:
    """Key, label, unit and samples of each series of one run."""
    command = [sys.executable, "-m", "deploy", "bench", "engine", "--rounds", "1", "--seed", str(seed)]
    command += ["--device", "cpu", "--only", ",".join(rows)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    done = subprocess.run(
        command, cwd=root, env={**environ, "PYTHONPATH": str(root)}, capture_output=True, text=True,
        timeout=MAX_RUN_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise StartError(f"{' '.join(command)} in {root} failed: {done.stderr[-1000:]}")
    for key, series in json.loads(done.stdout.splitlines()[-1])["series"].items():
        if key in SERIES:
            yield key, series["label"], series["unit"], series["samples"]


def comparison_table(comparisons: Sequence[Comparison], rounds: int) -> Table:
    """The comparison as a table."""
    result = Table("what", "other", "ours", "ours ÷ other", title=f"Medians of {rounds} interleaved rounds")
    for row in comparisons:
        verdict = "better" if (row.ratio > 1) == row.more_is_better else "worse"
        result.add_row(
            row.label, f"{row.other:.3g} {row.unit}", f"{row.ours:.3g} {row.unit}",
            f"{row.ratio:.3f} ({verdict})",
        )  # fmt: skip
    return result
