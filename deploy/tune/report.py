"""What `tercet tune` prints and draws: a table per plan, the latency over the throughput, the recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.load import plot
from deploy.load.report import Document, print_reasons
from deploy.terminal import labelled
from deploy.tune.check import Check
from deploy.tune.prediction import LatencyModel
from deploy.tune.results import Candidate, Figures, Measurement
from deploy.tune.search import MAX_STABLE_SHARE, Goal
from deploy.tune.trial import MAX_ATTEMPTS, QUIET_SHARE, Trial
from deploy.tune.tuning import Result
from shared.errors import StartError

PREDICTION_BOUND = 0.1
PLOT_COLUMNS, PLOT_ROWS = 72, 18
MARKS = "abcdefghijklmnopqrstuvwxyz"
CURVE_POINTS = 60


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


def environment(trial: Trial, result: Result) -> list[str]:
    """The lines to paste; none if no plan is recommended."""
    if result.chosen is None:
        return []
    candidate = result.chosen.candidate
    settings = {"models": trial.models(candidate), **candidate.settings()}
    return [f"TERCET_{name.upper()}={value}" for name, value in settings.items()]


def print_result(console: Console, result: Result, document: Document, goal: Goal, mps_note: str) -> None:
    """Everything but the recommendation.

    Raises:
        StartError: no plan could be served.
    """
    best = None if result.chosen is None else result.chosen.candidate
    for candidate, plan in result.plans.items():
        num_passes = result.num_passes[candidate]
        again = f", medians of {num_passes} passes" if num_passes > 1 else ""
        console.print(table(f"{'→ ' if candidate == best else ''}{candidate}{again}", plan.figures))
    for verb, candidate, reason in result.left_out:
        console.print(labelled(f"{verb}:", "yellow", f"{candidate}: {reason}"))
    if not result.plans:
        raise StartError("No plan could be served; the reasons are above.")
    console.print(terminal_plot(result.plans, best, goal.slo_ms))
    if mps_note:
        console.print(mps_note, highlight=False)
    if (check := result.check) is not None:
        title = f"Check of {best}, medians of {check.num_rounds} rounds"
        console.print(table(title, [*check.figures, check.measured]))
        console.print(verdict(check), highlight=False)
    print_reasons(console, document)


def encode_result(result: Result, document: Document, goal: Goal, lines: Sequence[str]) -> bytes:
    """The JSON document; a figure that is infinite becomes null."""
    chosen, check = result.chosen, result.check
    found = {
        **msgspec.structs.asdict(document),
        "goal": {"slo_ms": goal.slo_ms, "qps": goal.qps},
        "plans": [
            {"candidate": candidate, "passes": result.num_passes[candidate], "measurement": plan}
            for candidate, plan in result.plans.items()
        ],
        "left_out": [
            {"what": verb, "candidate": candidate, "reason": reason} for verb, candidate, reason in result.left_out
        ],
        "recommended": None if chosen is None else chosen.candidate,
        "reason": None if chosen is None else chosen.reason,
        "check": check,
        "check_error": None if check is None or check.predicted_ms == inf else round(check.error, 4),
        "environment": lines,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def notes(plans: Mapping[Candidate, Measurement]) -> list[str]:
    """How the figures are to be read."""
    client_cores = max((row.client_cpu_s for plan in plans.values() for row in plan.figures), default=0.0)
    return [
        "Latencies in ms, of answered requests; every prompt is new, so none is in a prefix cache.",
        f"Other load: share of all cores. Above {QUIET_SHARE:.0%} a turn is repeated, up to {MAX_ATTEMPTS - 1} times.",
        "Poisson arrivals do not wait for responses; their latency counts from the planned arrival.",
        f"The clients run on the same machine and used up to {client_cores:.2f} cores, which the server did not have.",
    ]


def verdict(check: Check) -> str:
    """Prediction and measurement, in a sentence each."""
    if check.predicted_ms == inf:
        return (
            f"Not checked: in its rounds the plan answered fewer than {check.measured.load.rate_qps:g} "
            "requests/s, the load of the check, and more in the search. The machine has become slower; run the same "
            "command with --again while nothing else uses it."
        )
    word = "met" if abs(check.error) <= PREDICTION_BOUND else "not met"
    return (
        f"At {check.measured.load.rate_qps:g} requests/s, a load outside the fit: predicted {check.predicted_ms:.1f} "
        f"ms, measured {check.measured.mean_ms:.1f} ms on average ({check.error:+.1%}; {word} within "
        f"{PREDICTION_BOUND:.0%}). Predicted before the check: {check.earlier_ms:.1f} ms."
    )


def unmet(goal: Goal, plans: Mapping[Candidate, Measurement]) -> str:
    """Why no plan is recommended, and what to do."""
    most_qps = max(plan.capacity_qps for plan in plans.values())
    least_ms = min(plan.light_ms for plan in plans.values())
    asked = f"--qps {goal.qps:g}" if goal.qps is not None else ""
    held = f"--slo-ms {goal.slo_ms:g}" if goal.slo_ms is not None else ""
    return (
        f"No plan on this machine holds {' at '.join(filter(None, (held, asked)))}: the most that one answered is "
        f"{most_qps:.1f} requests/s (a plan may use {MAX_STABLE_SHARE:.0%} of that), the least average latency "
        f"{least_ms:.0f} ms. Ask for less, serve a smaller model, or take a larger machine or more than one."
    )


def save_plot(result: Result, document: Document, goal: Goal, path: Path) -> None:
    """Average latency over throughput: every plan's closed loops, and the chosen plan's prediction with its check."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 5), layout="constrained")
    axes = figure.subplots()
    chosen = None if result.chosen is None else result.chosen.candidate
    for candidate, plan in result.plans.items():
        is_chosen = candidate == chosen
        axes.plot(
            [row.qps for row in plan.closed], [row.mean_ms for row in plan.closed], marker="o", markersize=4,
            linewidth=2.2 if is_chosen else 1, alpha=1 if is_chosen else 0.6, zorder=3 if is_chosen else 2,
            label=f"{candidate}{' (recommended)' if is_chosen else ''}",
        )  # fmt: skip
    if (check := result.check) is not None:
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
    if goal.slo_ms is not None:
        axes.axhline(goal.slo_ms, color="#c54", linewidth=1, linestyle=":", label=f"{goal.slo_ms:g} ms")
    highest_ms = max(row.mean_ms for plan in result.plans.values() for row in plan.closed)
    axes.set_ylim(0, 1.1 * max(highest_ms, goal.slo_ms or 0))
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("average latency, ms")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7, loc="upper left")
    plot.save(figure, document, path)
