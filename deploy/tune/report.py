"""What `tercet tune` prints and draws: a table per plan, the latency over the throughput, the recommendation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.bench.harness import plot
from deploy.bench.harness.report import Document
from deploy.tune.check import Check
from deploy.tune.prediction import LatencyModel
from deploy.tune.results import MIB, Candidate, Figures, Measurement

PLOT_COLUMNS, PLOT_ROWS = 72, 18
MARKS = "abcdefghijklmnopqrstuvwxyz"
CURVE_POINTS = 60


def one_line(candidate: Candidate, measurement: Measurement) -> str:
    """A plan that has just been measured."""
    return (
        f"[green]✓[/] {candidate}: {measurement.capacity_qps:.1f} requests/s, {measurement.light_ms:.0f} ms with one "
        f"client, {measurement.worker_bytes / MIB:,.0f} MiB per worker, loaded in {measurement.load_s:.1f} s"
    )


def table(title: str, figures: Sequence[Figures]) -> Table:
    """The columns of Patsnap's table, for each load."""
    found = Table(
        "concurrency", "QPS", "max", "min", "average", "p50", "p90", "p99", "errors", "other load", title=title
    )
    for column in found.columns[1:]:
        column.justify = "right"
    for row in figures:
        times = (row.max_ms, row.min_ms, row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms)
        found.add_row(
            str(row.load),
            f"{row.qps:.1f}",
            *(f"{value:.0f}" for value in times),
            str(row.num_errors),
            f"{row.others_share:.0%}",
        )
    return found


def terminal_plot(plans: Mapping[Candidate, Measurement], chosen: Candidate | None, slo_ms: float | None) -> Group:
    """Average latency over throughput; a letter for each plan's closed loops."""
    points = [
        (row.qps, row.mean_ms, MARKS[index % len(MARKS)], candidate == chosen)
        for index, (candidate, plan) in enumerate(plans.items())
        for row in plan.closed
    ]
    most_qps = max(point[0] for point in points)
    most_ms = max([point[1] for point in points] + ([slo_ms] if slo_ms else []))
    cells: dict[tuple[int, int], tuple[str, str]] = {}
    if slo_ms:
        cells = {(_row(slo_ms, most_ms), column): ("╌", "dim") for column in range(PLOT_COLUMNS)}
    for qps, mean_ms, mark, is_chosen in sorted(points, key=lambda point: point[3]):  # the chosen plan's on top
        column = round(qps / most_qps * (PLOT_COLUMNS - 1))
        cells[_row(mean_ms, most_ms), column] = (mark, "bold green" if is_chosen else "")
    lines: list[RenderableType] = [Text("average latency (ms) over requests/s, closed loops", "bold")]
    for row in range(PLOT_ROWS):
        is_labelled = row in {0, PLOT_ROWS // 2, PLOT_ROWS - 1}
        label = f"{most_ms * (PLOT_ROWS - 1 - row) / (PLOT_ROWS - 1):8,.0f} ┤" if is_labelled else " " * 9 + "│"
        lines.append(Text.assemble(label, *(cells.get((row, column), " ") for column in range(PLOT_COLUMNS))))
    lines.append(Text(" " * 9 + "└" + "─" * PLOT_COLUMNS))
    lines.append(Text(" " * 9 + "0" + f"{most_qps:.1f}".rjust(PLOT_COLUMNS)))
    for index, candidate in enumerate(plans):
        lines.append(Text(f"{MARKS[index % len(MARKS)]:>11}  {candidate}", "bold green" if candidate == chosen else ""))
    if slo_ms:
        lines.append(Text(f"{'╌':>11}  {slo_ms:g} ms"))
    return Group(*lines)


def _row(value_ms: float, most_ms: float) -> int:
    return PLOT_ROWS - 1 - round(value_ms / most_ms * (PLOT_ROWS - 1))


def environment(models: str, candidate: Candidate) -> Iterator[str]:
    """The lines to paste."""
    for name, value in {"models": models, **candidate.settings()}.items():
        yield f"TERCET_{name.upper()}={value}"


def save_plot(
    document: Document,
    plans: Mapping[Candidate, Measurement],
    chosen: Candidate | None,
    check: Check | None,
    slo_ms: float | None,
    path: Path,
) -> None:
    """Average latency over throughput: every plan's closed loops, and the chosen plan's prediction with its check.

    Args:
        check: of the chosen plan.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.subplots()
    for candidate, plan in plans.items():
        is_chosen = candidate == chosen
        axes.plot(
            [row.qps for row in plan.closed], [row.mean_ms for row in plan.closed], marker="o", markersize=4,
            linewidth=2.2 if is_chosen else 1, alpha=1 if is_chosen else 0.6, zorder=3 if is_chosen else 2,
            label=f"{candidate}{' (recommended)' if is_chosen else ''}",
        )  # fmt: skip
    if check is not None:
        model = LatencyModel.fit(check.figures)
        rates = [model.capacity_qps * number / CURVE_POINTS for number in range(1, CURVE_POINTS)]
        axes.plot(
            rates, [model.open_ms(rate) for rate in rates], color="black", linestyle="--", linewidth=1,
            label="recommended plan, Poisson arrivals: predicted",
        )  # fmt: skip
        fitted = [row for row in check.figures if row.load.kind == "open"]
        axes.plot(
            [row.load.rate_qps for row in fitted], [row.mean_ms for row in fitted], color="black", marker="x",
            linestyle="", label="recommended plan, Poisson arrivals: in the fit", zorder=4,
        )  # fmt: skip
        axes.plot(
            [check.measured.load.rate_qps], [check.measured.mean_ms], color="black", marker="*", markersize=13,
            linestyle="", label="recommended plan, Poisson arrivals: the check", zorder=4,
        )  # fmt: skip
    if slo_ms is not None:
        axes.axhline(slo_ms, color="#c54", linewidth=1, linestyle=":", label=f"{slo_ms:g} ms")
    highest_ms = max(row.mean_ms for plan in plans.values() for row in plan.closed)
    axes.set_ylim(0, 1.1 * max(highest_ms, slo_ms or 0))
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("average latency, ms")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, loc="upper left")
    plot.save(figure, document, path)
