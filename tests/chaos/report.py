"""Renders results: a table for the terminal, and docs/RELIABILITY.md."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from deploy.load.machine import Machine
from tests.chaos.measure import RowResult
from tests.e2e.harness import ROOT


@dataclass(frozen=True)
class Run:
    """The provenance of a run's figures. `others_share_of_cores` is 0 to 1; the instances under test are no others."""

    command: str
    date: str
    elapsed_s: float
    seed: int
    commit: str
    machine: Machine
    versions: Mapping[str, str]
    num_cores: int


def commit() -> str:
    """The checkout's commit, and whether it was changed since."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown (no git checkout)"


def figures(result: RowResult, *, with_zeros: bool = True) -> str:
    """Return a row's figures in one line.

    Args:
        with_zeros: whether to list figures that are 0, like counts of failures.
    """
    return "; ".join(f"{name} {_number(value)}" for name, value in result.figures.items() if with_zeros or value != 0)


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def verdict(result: RowResult) -> str:
    return "held" if result.held else "falls short"


def terminal_table(results: Sequence[RowResult]) -> Table:
    table = Table("row", "promise", "measured", "", "s")
    for result in results:
        style = "green" if result.held else "red"
        table.add_row(
            result.row, result.promise, figures(result), f"[{style}]{verdict(result)}[/]", f"{result.elapsed_s:.0f}"
        )
    return table


def page(results: Sequence[RowResult], run: Run, not_measured: Mapping[str, str]) -> str:
    """The text of docs/RELIABILITY.md."""
    short = [result for result in results if not result.held]
    memory_gb = run.machine.memory_bytes / 1e9
    lines = [
        "# Reliability, measured",
        "",
        "What Tercet promises under faults, overload and attack, and what was measured. `make chaos` measures all rows",
        "with real processes on the loopback interface, two or more slots, and the embedded checkpoint in fp32.",
        "`make soak` does the same with ten times the amounts. Figures that are 0 are left out.",
        "",
        f"- command: `{run.command}`, seed {run.seed}",
        f"- date: {run.date}, {run.elapsed_s / 60:.0f} minutes",
        f"- commit: {run.commit}",
        f"- machine: {run.machine.cpu}, {run.num_cores} cores, {memory_gb:.0f} GB memory; {run.machine.system}",
        f"- versions: {', '.join(f'{name} {number}' for name, number in run.versions.items())}",
        "- clients, proxies and nginx run on the same cores as the server under test",
        "",
        f"{len(results) - len(short)} of {len(results)} rows hold.",
        "",
        "| row | promise | measured | |",
        "|---|---|---|---|",
    ]
    for result in results:
        measured = figures(result, with_zeros=False) + _note(result)
        lines.append(f"| {result.row} | {result.promise} | {_cell(measured)} | {verdict(result)} |")
    lines += ["", "## Rows that fall short", ""]
    if not short:
        lines += ["None."]
    for result in short:
        lines += [f"- **{result.row}**: {'; '.join(result.shortfalls)}."]
    lines += ["", "## Not measured", ""]
    lines += [f"- {rows}: {reason}." for rows, reason in not_measured.items()]
    return "\n".join(lines) + "\n"


def _note(result: RowResult) -> str:
    return f" ({result.note})" if result.note else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
