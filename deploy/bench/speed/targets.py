"""The rows of `tercet bench engine` and what each is required to show. Pure: measures nothing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Sense = Literal["at least", "at most"]


class Target(msgspec.Struct, frozen=True):
    """A row's bounds. `required` and `goal` are in `unit`; `sense` says on which side of them a result is good."""

    name: str
    title: str
    device: Literal["cpu", "gpu"]
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
        Target("request", "W through the gateway, cold: speedup over baseline (a)", "cpu", "at least", 20, 29, "×"),
        Target("batched", "W through the gateway, cold: speedup over baseline (b), bf16", "cpu",
               "at least", 7, 9, "×"),
        Target("engine", "W in the engine alone: time ÷ linear layers of W", "cpu", "at most", 1.8, 1.4, "×"),
        Target("keystroke", "next keystroke at 512 tokens: time ÷ linear layers of 19 steps", "cpu",
               "at most", 1.9, 1.5, "×"),
        Target("document", "next word, 2,000-word document: time ÷ linear layers of 19 steps", "cpu",
               "at most", 2, 1.5, "×"),
        Target("clients", "16 closed-loop clients: tokens/s ÷ tokens/s of linear layers", "cpu",
               "at least", 0.55, 0.75, "×"),
        Target("overhead", "gateway and HTTP: request − engine time, p50", "cpu", "at most", 6, 4, "ms"),
        Target("start", "worker from fork to warm, embedded checkpoint", "cpu", "at most", 5, 3, "s"),
        Target("embedded", "W through the gateway, cold, embedded checkpoint", "cpu", "at most", 60, None, "ms"),
        Target("gpu-request", "W through the gateway, cold: speedup over baseline (a), bf16", "gpu",
               "at least", 15, 25, "×"),
        Target("gpu-compiled", "W through the gateway, cold: speedup over static cache + compile", "gpu",
               "at least", 3, 5, "×"),
        Target("gpu-small", "decode step, 3 rows, small: ÷ weight + KV read time", "gpu",
               "at most", 4, 2.5, "×"),
        Target("gpu-medium", "decode step, 3 rows, medium: ÷ weight + KV read time", "gpu",
               "at most", 2.5, 1.8, "×"),
        Target("gpu-crowd", "decode step, 96 different prompts of 150 tokens: ÷ weight + KV read time", "gpu",
               "at most", 4, 2.5, "×"),
    )
}  # fmt: skip


def measured(
    name: str, figure: float, *, ours: float, unit: str, against: float | None = None, is_comparable: bool = True,
    **details: Any,
) -> Row:  # fmt: skip
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


def not_measured(name: str, why_not: str) -> Row:
    return Row(target=TARGETS[name], why_not=why_not)


def is_met(figure: float, bound: float, sense: Sense) -> bool:
    """A result equal to the bound meets it."""
    return figure >= bound if sense == "at least" else figure <= bound
