"""The rows of `engine`: what each is required to show, and its figure computed from the samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import msgspec

from deploy.load.rounds import Results, percentile
from deploy.load.workload import Workload

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
    details: dict[str, Any] = {}


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
# Row: (Tercet's series, the series it is compared with, whether the figure is a speedup, not a ratio of times).
COMPARISONS = {
    "request": ("gateway", "a", True),
    "batched": ("gateway", "b-bf16", True),
    "engine": ("engine", "linears-request", False),
    "keystroke": ("keystroke", "linears-steps", False),
    "document": ("document", "document-linears-steps", False),
    "predict": ("predict", "embedded", False),
}
# The series that the other rows need.
SERIES = {
    "clients": ("clients", "linears-crowd"),
    "overhead": ("gateway",),
    "start": ("start",),
    "embedded": ("embedded",),
}


def rows(wanted: Sequence[str], results: Results, workload: Workload, *, is_comparable: bool) -> list[Row]:
    """A row for each wanted name; where a contender failed, a row with the reason.

    Args:
        is_comparable: whether the model has the shape that the targets are for.
    """
    found = []
    # A measurement outside the rounds is named by its row, and all its series are missing if it fails.
    why_any = "; ".join(results.failures.values()) or "it was not run"
    for name in wanted:
        needed = SERIES.get(name) or COMPARISONS[name][:2]
        if missing := [series for series in needed if series not in results.samples]:
            why_not = f"{missing[0]} failed: {results.failures.get(missing[0], why_any)}"
            found.append(Row(target=TARGETS[name], why_not=why_not))
        else:
            found.append(_row(name, results.samples, workload, is_comparable))
    return found


def is_met(figure: float, bound: float, sense: Sense) -> bool:
    """A result equal to the bound meets it."""
    return figure >= bound if sense == "at least" else figure <= bound


def _row(name: str, samples: Mapping[str, Sequence[float]], workload: Workload, is_comparable: bool) -> Row:
    medians = {series: median(values) for series, values in samples.items()}
    if name in COMPARISONS:
        ours_name, other_name, is_speedup = COMPARISONS[name]
        ours, other = medians[ours_name], medians[other_name]
        figure = other / ours if is_speedup else ours / other
        # The target is for a document of full length.
        is_comparable &= name != "document" or len(samples[name]) >= NUM_WORDS
        return _measured(
            name,
            figure,
            ours=ours,
            unit="ms",
            against=other,
            is_comparable=is_comparable or name == "predict",
            num_samples=len(samples[ours_name]),
        )
    if name == "clients":
        num_tokens = NUM_CLIENTS * workload.num_samples * workload.num_new_tokens
        ceiling = 1e3 * num_tokens / medians["linears-crowd"]
        ours = medians["clients"]
        return _measured(
            name,
            ours / ceiling,
            ours=ours,
            unit="tokens/s",
            against=ceiling,
            is_comparable=is_comparable,
            share_of_cores_spent_by_clients=round(medians["clients-cost"], 4),
        )
    if name == "overhead":
        overhead = percentile(samples["gateway-overhead"], 0.5)
        return _measured(name, overhead, ours=overhead, unit="ms", is_comparable=is_comparable)
    if name == "start":
        first = round(samples["start"][0], 3)
        return _measured(name, medians["start"], ours=medians["start"], unit="s", first_start_s=first)
    return _measured(name, medians["embedded"], ours=medians["embedded"], unit="ms")


def _measured(
    name: str,
    figure: float,
    *,
    ours: float,
    unit: str,
    against: float | None = None,
    is_comparable: bool = True,
    **details: Any,
) -> Row:
    """A row with its verdicts. They are left out where the figure is not comparable: a model of another shape."""
    target = TARGETS[name]
    return Row(
        target=target,
        figure=round(figure, 4),
        ours=round(ours, 4),
        ours_unit=unit,
        against=None if against is None else round(against, 4),
        is_met=is_met(figure, target.required, target.sense) if is_comparable else None,
        is_goal_met=is_met(figure, target.goal, target.sense) if is_comparable and target.goal is not None else None,
        details=details,
    )
