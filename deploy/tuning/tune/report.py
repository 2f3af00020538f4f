"""What `tercet tune` prints: a table per plan, what was left out, the recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.terminal import json_lines, labelled
from deploy.tuning.load.run import Document, doubts, print_notes
from deploy.tuning.tune.results import Candidate, Figures, Measurement
from deploy.tuning.tune.search import MAX_STABLE_SHARE, Goal
from deploy.tuning.tune.trial import Result, Trial
from shared.errors import StartError


def table(title: str, figures: Sequence[Figures]) -> Table:
    """The columns of Patsnap's table, for each load."""
    found = Table("concurrency", "QPS", "max", "min", "average", "p50", "p90", "p99", "errors", title=title)
    for column in found.columns[1:]:
        column.justify = "right"
    for row in figures:
        times = (row.max_ms, row.min_ms, row.mean_ms, row.p50_ms, row.p90_ms, row.p99_ms)
        found.add_row(
            str(row.load),
            f"{row.qps:.1f}",
            *(f"{value:.0f}" for value in times),
            str(row.num_errors),
        )
    return found


def environment(trial: Trial, result: Result) -> list[str]:
    """The lines to paste; none if no plan is recommended."""
    if result.chosen is None:
        return []
    candidate = result.chosen.candidate
    settings = {"models": trial.models(candidate), **candidate.settings()}
    return [f"TERCET_{name.upper()}={value}" for name, value in settings.items()]


def comments(result: Result, document: Document) -> list[str]:
    """Comment lines for the environment file: why the recommendation is not to be relied on. A file that a script has
    written is read later, without what was printed."""
    found = [f"# {heading} {text}" for heading, text in doubts(document).items()]
    if not result.is_complete:
        found.append("# --budget was spent before all plans were measured: another may be better.")
    return found


def print_result(console: Console, result: Result, document: Document) -> None:
    """Everything but the recommendation.

    Raises:
        StartError: no plan could be served.
    """
    best = None if result.chosen is None else result.chosen.candidate
    for candidate, plan in result.plans.items():
        again = f", medians of {plan.num_passes} passes" if plan.num_passes > 1 else ""
        console.print(table(f"{'→ ' if candidate == best else ''}{candidate}{again}", plan.figures))
    for verb, candidate, reason in result.left_out:
        console.print(labelled(f"{verb}:", "yellow", f"{candidate}: {reason}"))
    if not result.plans:
        raise StartError("No plan could be served; the reasons are above.")
    print_notes(console, document)


def encode_result(result: Result, document: Document, goal: Goal, lines: Sequence[str]) -> bytes:
    """Encode the JSON document."""
    chosen = result.chosen
    found = {
        **msgspec.structs.asdict(document),
        "goal": {"slo_ms": goal.slo_ms, "qps": goal.qps},
        "plans": [
            {"candidate": candidate, "passes": plan.num_passes, "measurement": plan}
            for candidate, plan in result.plans.items()
        ],
        "left_out": [
            {"what": verb, "candidate": candidate, "reason": reason} for verb, candidate, reason in result.left_out
        ],
        "recommended": None if chosen is None else chosen.candidate,
        "reason": None if chosen is None else chosen.reason,
        "environment": lines,
    }
    return json_lines(found)


def notes(plans: Mapping[Candidate, Measurement]) -> list[str]:
    """How the figures are to be read."""
    client_cores = max((row.client_cpu_s for plan in plans.values() for row in plan.figures), default=0.0)
    return [
        "Latencies in ms, of answered requests; every prompt is new, so none is in a prefix cache.",
        "Poisson arrivals (--qps) do not wait for responses; their latency counts from the planned arrival.",
        f"The clients run on the same machine and used up to {client_cores:.2f} cores, which the server did not have.",
    ]


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
