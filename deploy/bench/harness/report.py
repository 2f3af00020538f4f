"""What a bench says: tables for a person on standard error, one JSON document last on standard output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.harness.levels import Level
from deploy.bench.harness.machine import Machine
from deploy.bench.harness.rounds import Series
from deploy.bench.harness.targets import Row, Target

# Others' share of the cores above which figures are to be doubted.
BUSY_SHARE = 0.05


class Document(msgspec.Struct, kw_only=True):
    """The result of one run. Times in the unit that stands beside them."""

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
    """The JSON document, on one line: `tail -n 1` finds it."""
    sys.stdout.flush()
    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.buffer.flush()


def print_machine(console: Console, machine: Machine, versions: Mapping[str, str]) -> None:
    gpus = ", ".join(machine.gpus) or "none"
    console.print(
        f"[bold]{machine.cpu}[/], {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, "
        f"{' '.join(machine.flags)}; GPU: {gpus}",
        highlight=False,
    )
    console.print(", ".join(f"{name} {number}" for name, number in versions.items()), highlight=False)


def print_bandwidth(console: Console, bandwidth: Mapping[str, float]) -> None:
    console.print(
        f"Memory: reads {bandwidth['read_gb_s']:g} GB/s, copies {bandwidth['copy_gb_s']:g} GB/s (read and written)",
        highlight=False,
    )


def kernel_table(kernels: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    """Kernels × rows: all linear layers of one step, the head over every row (DESIGN.md's table, turned over).

    Args:
        kernels: row count → layer → kernel → milliseconds.
    """
    table = Table("kernel", title="A step's linear layers, ms, by rows")
    for rows in kernels:
        table.add_column(rows, justify="right")
    for name in dict.fromkeys(name for layers in kernels.values() for times in layers.values() for name in times):
        table.add_row(name, *(_number(sum(times[name] for times in layers.values())) for layers in kernels.values()))
    best = (sum(min(times.values()) for times in layers.values()) for layers in kernels.values())
    table.add_row("fastest for each layer", *map(_number, best), style="bold")
    return table


def series_table(title: str, series: Sequence[Series], against: Series | None = None) -> Table:
    """Medians with their spread; with `against`, how many times as long each takes."""
    table = Table("what", "median", "min", "max", "n", title=title)
    if against is not None:
        table.add_column(f"÷ {against.label}")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in series:
        cells = [f"{_number(one.median)} {one.unit}", _number(one.min), _number(one.max), str(len(one.samples))]
        if against is not None:
            cells.append(f"{_number(one.median / against.median)}×" if one.unit == against.unit else "")
        table.add_row(one.label, *cells)
    return table


def rows_table(rows: Sequence[Row]) -> Table:
    """Issue 3's table with our figures in it."""
    table = Table(title="Targets")
    for heading in ("what", "ours", "against", "figure", "must", "", "we want", ""):
        table.add_column(heading, justify="left" if heading in {"what", ""} else "right")
    for row in rows:
        target = row.target
        must, want = _bound(target, target.must), _bound(target, target.want)
        if row.figure is None:
            table.add_row(target.title, "not measured", "", "", must, "", want, "")
            continue
        table.add_row(
            target.title,
            f"{_number(row.ours)} {row.ours_unit}",
            "" if row.against is None else f"{_number(row.against)} {row.ours_unit}",
            f"{_number(row.figure)} {target.unit}".replace(" ×", "×"),
            must,
            _verdict(row.is_met),
            want,
            _verdict(row.is_want_met) if target.want is not None else "",
        )
    return table


def levels_table(levels: Sequence[Level]) -> Table:
    """The table of the Patsnap post (concurrency, QPS, max, min, average), and what it leaves open."""
    table = Table(title="Closed-loop clients through the gateway; times in ms")
    headings = (
        "clients", "QPS", "max", "min", "average", "p50", "p90", "p99", "first token*", "n", "errors",
        "QPS ceiling", "share", "× the seed", "clients' cost",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    for level in levels:
        times = (
            level.max_ms, level.min_ms, level.mean_ms, level.p50_ms, level.p90_ms, level.p99_ms,
            level.first_token_p50_ms,
        )  # fmt: skip
        table.add_row(
            str(level.num_clients),
            _number(level.qps),
            *map(_number, times),
            str(level.num_requests),
            str(level.num_errors),
            _number(level.ceiling_qps),
            _number(level.share_of_ceiling),
            _number(level.times_the_seed),
            f"{level.client_share_of_cores:.1%}",
        )
    return table


def print_reasons(console: Console, document: Document) -> None:
    """Why something was not measured, and what the figures mean."""
    reasons = document.not_measured
    for why in dict.fromkeys(reasons.values()):
        names = ", ".join(name for name, reason in reasons.items() if reason == why)
        console.print(f"[yellow]Not measured:[/] {names}: {why}", highlight=False)
    for note in document.notes:
        console.print(f"[dim]{note}[/]", highlight=False)
    if document.is_quick:
        console.print("[yellow]Quick:[/] it works; these figures are not to be quoted.")
    share = document.machine.others_share_of_cores
    console.print(f"[dim]{document.elapsed_s:.0f} s, in which others had {share:.0%} of the cores.[/]")
    if share > BUSY_SHARE:
        console.print("[yellow]The machine was shared:[/] times are longer than its own, ratios less sure.")


def _bound(target: Target, bound: float | None) -> str:
    if bound is None:
        return ""
    return f"{'≥' if target.sense == 'at least' else '≤'} {bound:g} {target.unit}".replace(" ×", "×")


def _verdict(is_met: bool | None) -> str:
    if is_met is None:
        return "–"
    return "[green]met[/]" if is_met else "[red]not met[/]"


def _number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
