"""The rows of `engine`: what each is required to show, and its figure computed from the samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec
from rich.table import Table

from deploy.load.workload import Workload
from tests.bench.rounds import Results
from tests.bench.run import format_number

NUM_CLIENTS = 16
NUM_WORDS = 2000
Sense = Literal["at least", "at most"]


class Target(msgspec.Struct, frozen=True):
    """A row's bounds. `required` and `goal` are in `unit`; `sense` says on which side of them a result is good."""

    name: str
    title: str
    sense: Sense
    required: float
    goal: float | None
    unit: str


class Row(msgspec.Struct, kw_only=True):
    """A target and its result: a ratio or, where the target has a unit, a time. None with the reason in `why_not`."""

    target: Target
    figure: float | None = None
    ours: float | None = None  # Tercet's median, in ours_unit
    ours_unit: str = ""
    against: float | None = None  # the baseline's or the ceiling's median, in ours_unit
    is_met: bool | None = None
    is_goal_met: bool | None = None
    why_not: str | None = None


TARGETS = {
    target.name: target
    for target in (
        Target("request", "W through the gateway, cold: speedup over baseline (a)", "at least", 20, 29, "×"),
        Target("batched", "W through the gateway, cold: speedup over baseline (b), bf16", "at least", 7, 9, "×"),
        Target("engine", "W in the engine alone: time ÷ linear layers of W", "at most", 1.8, 1.4, "×"),
        Target("keystroke", "next keystroke at 512 tokens: time ÷ linear layers of 19 steps", "at most", 1.9, 1.5, "×"),
        Target("document", "next word, 2,000-word document: time ÷ linear layers of 19 steps", "at most", 2, 1.5, "×"),
        Target("clients", "16 closed-loop clients: tokens/s ÷ tokens/s of linear layers", "at least", 0.55, 0.75, "×"),
        Target("overhead", "gateway and HTTP: request − engine time, p50", "at most", 6, 4, "ms"),
        Target("start", "worker from fork to warm, embedded checkpoint", "at most", 5, 3, "s"),
        Target("embedded", "W through the gateway, cold, embedded checkpoint", "at most", 60, None, "ms"),
        Target("predict", "W by the strategy predict: time ÷ W, embedded checkpoint", "at most", 1, None, "×"),
    )
}
# Row: Tercet's series, and the series of times that it is compared with.
SERIES: dict[str, tuple[str, ...]] = {
    "request": ("gateway", "a"),
    "batched": ("gateway", "b-bf16"),
    "engine": ("engine", "linears-request"),
    "keystroke": ("keystroke", "linears-steps"),
    "document": ("document", "document-linears-steps"),
    "clients": ("clients", "linears-crowd"),
    "overhead": ("gateway-overhead",),
    "start": ("start",),
    "embedded": ("embedded",),
    "predict": ("predict", "embedded"),
}
SPEEDUPS = {"request", "batched"}  # the figure is not a ratio of times, but its inverse
ANY_MODEL = {"start", "embedded", "predict"}  # targets for the embedded checkpoint, whatever the model under test


def rows(wanted: Sequence[str], results: Results, workload: Workload, *, is_comparable: bool) -> list[Row]:
    """A row for each wanted name; where a contender failed, a row with the reason.

    Args:
        is_comparable: whether the model has the shape that the targets are for.
    """
    found = []
    # A measurement outside the rounds is named by its row, and all its series are missing if it fails.
    why_any = "; ".join(results.failures.values()) or "it was not run"
    for name in wanted:
        if missing := [series for series in SERIES[name] if series not in results.samples]:
            why_not = f"{missing[0]} failed: {results.failures.get(missing[0], why_any)}"
            found.append(Row(target=TARGETS[name], why_not=why_not))
        else:
            found.append(_row(name, results.samples, workload, is_comparable))
    return found


def is_met(figure: float, bound: float, sense: Sense) -> bool:
    """A result equal to the bound meets it."""
    return figure >= bound if sense == "at least" else figure <= bound


def _row(name: str, samples: Mapping[str, Sequence[float]], workload: Workload, is_comparable: bool) -> Row:
    """A row with its verdicts. They are left out where the figure is not comparable: a model of another shape."""
    target = TARGETS[name]
    ours, *others = (median(samples[series]) for series in SERIES[name])
    unit = "ms" if target.unit == "×" else target.unit
    if name == "clients":
        unit = "tokens/s"
        others = [1e3 * NUM_CLIENTS * workload.num_samples * workload.num_new_tokens / others[0]]
    figure = ours
    for other in others:
        figure = other / ours if name in SPEEDUPS else ours / other
    # The target of `document` is for one of full length.
    is_comparable &= name != "document" or len(samples[name]) >= NUM_WORDS
    is_comparable |= name in ANY_MODEL
    return Row(
        target=target,
        figure=round(figure, 4),
        ours=round(ours, 4),
        ours_unit=unit,
        against=round(others[0], 4) if others else None,
        is_met=is_met(figure, target.required, target.sense) if is_comparable else None,
        is_goal_met=is_met(figure, target.goal, target.sense) if is_comparable and target.goal is not None else None,
    )


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
