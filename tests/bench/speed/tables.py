"""The tables of `engine` and `http`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from deploy.load.report import format_number
from deploy.load.rounds import Series
from tests.bench.speed.levels import Level
from tests.bench.speed.rows import Row, Target


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


def rows_table(rows: Sequence[Row]) -> Table:
    """Each target with its result."""
    table = Table(title="Targets")
    for heading in ("row", "Tercet", "compared with", "result", "required", "", "goal", ""):
        table.add_column(heading, justify="left" if heading in {"row", ""} else "right")
    for row in rows:
        target = row.target
        required, goal = _bound(target, target.required), _bound(target, target.goal)
        if row.figure is None:
            table.add_row(target.title, "not measured", "", "", required, "", goal, "")
            continue
        table.add_row(
            target.title,
            f"{format_number(row.ours)} {row.ours_unit}",
            "" if row.against is None else f"{format_number(row.against)} {row.ours_unit}",
            _with_unit(format_number(row.figure), target),
            required,
            _verdict(row.is_met),
            goal,
            _verdict(row.is_goal_met) if target.goal is not None else "",
        )
    return table


def levels_table(levels: Sequence[Level]) -> Table:
    """Requests per second and latencies by number of clients.

    The first columns are those of Patsnap's post on GPT-2 autocompletion on SageMaker (concurrency, QPS, max, min,
    average).
    """
    table = Table(title="Closed-loop clients through the gateway; latencies in ms")
    headings = (
        *("workload", "clients", "requests/s", "max", "min", "mean", "p50", "p90", "p99", "TTFT p50*", "n", "errors"),
        *("ceiling requests/s", "÷ ceiling", "× baseline (a)", "client CPU"),
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for level in levels:
        percentiles_ms = level.p50_ms, level.p90_ms, level.p99_ms, level.first_token_p50_ms
        times_ms = level.max_ms, level.min_ms, level.mean_ms, *percentiles_ms
        table.add_row(
            level.workload,
            str(level.num_clients),
            format_number(level.qps),
            *map(format_number, times_ms),
            str(level.num_requests),
            str(level.num_errors),
            format_number(level.ceiling_qps),
            format_number(level.share_of_ceiling),
            format_number(level.speedup),
            f"{level.client_share_of_cores:.1%}",
        )
    return table


def _bound(target: Target, bound: float | None) -> str:
    if bound is None:
        return ""
    return _with_unit(f"{'≥' if target.sense == 'at least' else '≤'} {bound:g}", target)


def _with_unit(text: str, target: Target) -> str:
    return f"{text}×" if target.unit == "×" else f"{text} {target.unit}"


def _verdict(is_met: bool | None) -> str:
    if is_met is None:
        return "–"
    return "[green]met[/]" if is_met else "[red]not met[/]"
