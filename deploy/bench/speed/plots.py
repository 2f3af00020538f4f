"""The plots of `tercet bench engine` and `tercet bench http`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.bench.speed.levels import Level
from deploy.bench.speed.targets import Row
from deploy.load import plot
from deploy.load.report import Document


def plot_rows(document: Document, rows: Sequence[Row], path: Path) -> None:
    """Two panels: the median time of each series, log scale, and each result relative to its required bound."""
    from matplotlib.figure import Figure

    times = [series for series in document.series.values() if series.unit == "ms"]
    shown = [row for row in rows if row.figure is not None]
    figure = Figure(figsize=(11, 1.5 + 0.32 * (len(times) + len(shown))), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=[max(1, len(times)), max(1, len(shown))])
    axes[0].barh(
        [series.label for series in times],
        [series.median for series in times],
        color=[_colour(series.label) for series in times],
    )
    if times:
        axes[0].set_xscale("log")
    axes[0].set_xlabel("median, ms")
    # More than 1 is better for either sense.
    ratios = [
        row.figure / row.target.required if row.target.sense == "at least" else row.target.required / row.figure
        for row in shown
        if row.figure
    ]
    axes[1].barh(
        [row.target.title for row in shown], ratios, color=["#4a8" if ratio >= 1 else "#c54" for ratio in ratios]
    )
    axes[1].axvline(1, color="black", linewidth=1)
    axes[1].set_xlabel("result relative to the required bound (1: just met; higher is better)")
    for axis in axes:
        axis.invert_yaxis()
    plot.save(figure, document, path)


def plot_levels(document: Document, levels: Sequence[Level], path: Path) -> None:
    """Two panels over the number of clients: requests per second with the ceiling, and latencies."""
    from matplotlib.figure import Figure

    levels = [level for level in levels if level.workload == "W"]
    numbers = [level.num_clients for level in levels]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(numbers, [level.qps for level in levels], marker="o", label="Tercet")
    bounded = [level for level in levels if level.ceiling_qps is not None]
    left.plot(
        [level.num_clients for level in bounded], [level.ceiling_qps or 0 for level in bounded],
        linestyle="--", marker=".", label="ceiling: linear layers alone",
    )  # fmt: skip
    left.set_ylabel("requests per second")
    for name in ("p50", "p90", "p99"):
        right.plot(numbers, [getattr(level, f"{name}_ms") for level in levels], marker="o", label=name)
    right.plot(
        numbers, [level.first_token_p50_ms for level in levels],
        marker=".", linestyle=":", label="time to first token, p50",
    )  # fmt: skip
    right.set_ylabel("ms")
    for axis in (left, right):
        axis.set_xlabel("concurrent closed-loop clients")
        axis.set_ylim(bottom=0)
        axis.legend()
    plot.save(figure, document, path)


def _colour(label: str) -> str:
    return {"Tercet": "#4a8", "ceiling": "#88a"}.get(label.partition(":")[0], "#bbb")
