"""The output of a run: lines and tables on standard error, one JSON document last on standard output."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from deploy.load.machine import Machine
from deploy.load.rounds import Series
from deploy.terminal import labelled

# Share of the cores used by other processes above which a warning is printed.
BUSY_SHARE = 0.05


class Document(msgspec.Struct, kw_only=True):
    """The result of one run. Each figure's unit is in its name, or in a field next to it."""

    bench: str
    command: str
    started_at: str  # ISO 8601, UTC
    elapsed_s: float = 0.0
    is_quick: bool  # too few repetitions to quote
    machine: Machine
    versions: dict[str, str]
    model: str
    device: str
    settings: dict[str, str]
    workload: dict[str, Any]
    ceiling: dict[str, Any] = {}
    series: dict[str, Series] = {}
    rows: list[Any] = []
    not_measured: dict[str, str] = {}
    notes: list[str] = []


def write(document: Document) -> None:
    """Write the JSON document as one line: `tail -n 1` extracts it."""
    sys.stdout.flush()
    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.buffer.flush()


def print_machine(console: Console, machine: Machine, versions: Mapping[str, str]) -> None:
    gpus = ", ".join(machine.gpus) or "none"
    console.print(
        Text.assemble(
            (machine.cpu, "bold"),
            f", {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, ",
            f"{' '.join(machine.flags)}; GPU: {gpus}",
        )
    )
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()), highlight=False)


def print_bandwidth(console: Console, bandwidth: Mapping[str, float]) -> None:
    console.print(
        f"Achieved memory bandwidth: read {bandwidth['read_gb_s']:g} GB/s, "
        f"copy {bandwidth['copy_gb_s']:g} GB/s (read + written)",
        highlight=False,
    )


def print_reasons(console: Console, document: Document) -> None:
    """What was not measured and why, the notes, and how far the figures can be trusted."""
    reasons = document.not_measured
    for why in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, reason in reasons.items() if reason == why)
        console.print(labelled("Not measured:", "yellow", f"{names}: {why}"))
    for note in document.notes:
        console.print(Text(note, "dim"))
    if document.is_quick:
        console.print(labelled("Quick run:", "yellow", "a functional check; do not quote its figures."))
    share = document.machine.others_share_of_cores
    console.print(Text(f"{document.elapsed_s:.0f} s; other processes used {share:.0%} of the cores.", "dim"))
    if share > BUSY_SHARE:
        console.print(labelled("The machine was shared:", "yellow", "times are too long and ratios less certain."))


def format_number(value: float | None) -> str:
    """Three significant digits; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
