"""The targets, row by row, and the verdicts.

Pure: what a figure is compared with is measured elsewhere.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Sense = Literal["at least", "at most"]


class Target(msgspec.Struct, frozen=True):
    """What a row must show. `must` and `want` are in `unit`; `sense` says which side of them is good."""

    name: str
    title: str
    device: Literal["cpu", "gpu"]
    sense: Sense
    must: float
    want: float | None
    unit: str
    issue: int = 3


class Row(msgspec.Struct, kw_only=True):
    """A target and what was measured. `figure` is what the target speaks of; None with the reason in `why_not`."""

    target: Target
    figure: float | None = None
    ours: float | None = None  # in ours_unit
    ours_unit: str = ""
    against: float | None = None  # in ours_unit too
    is_met: bool | None = None
    is_want_met: bool | None = None
    why_not: str | None = None
    details: dict[str, Any] = {}


TARGETS = {
    target.name: target
    for target in (
        Target("request", "whole request through the gateway, cold, against (a)", "cpu", "at least", 20, 29, "×"),
        Target("batched", "the same, against (b) bf16", "cpu", "at least", 7, 9, "×"),
        Target("engine", "engine alone, against its linear layers alone", "cpu", "at most", 1.8, 1.4, "×"),
        Target("keystroke", "next keystroke at 512 tokens, against its 19 steps' linear layers", "cpu",
               "at most", 1.9, 1.5, "×"),
        Target("document", "2,000 words typed at the end: median, against the same", "cpu", "at most", 2, 1.5, "×"),
        Target("clients", "16 clients at once: tokens/s, against the linear layers'", "cpu",
               "at least", 0.55, 0.75, "×"),
        Target("overhead", "gateway and HTTP: request minus the engine's own time, p50", "cpu", "at most", 6, 4, "ms"),
        Target("start", "worker from start to warm, embedded checkpoint", "cpu", "at most", 5, 3, "s"),
        Target("embedded", "W with the embedded checkpoint through the gateway", "cpu", "at most", 60, None, "ms", 6),
        Target("gpu-request", "whole request, against (a) in bf16", "gpu", "at least", 15, 25, "×"),
        Target("gpu-compiled", "whole request, against static cache + compile, batched", "gpu", "at least", 3, 5, "×"),
        Target("gpu-small", "decode step, batch 3, small: against 74 µs", "gpu", "at most", 4, 2.5, "×"),
        Target("gpu-medium", "decode step, batch 3, medium: against 211 µs", "gpu", "at most", 2.5, 1.8, "×"),
        Target("gpu-crowd", "decode step, batch 96, 150 tokens: against (weights + KV) ÷ bandwidth", "gpu",
               "at most", 4, 2.5, "×"),
    )
}  # fmt: skip


def measured(
    name: str, figure: float, *, ours: float, unit: str, against: float | None = None, is_comparable: bool = True,
    **details: Any,
) -> Row:  # fmt: skip
    """A row with its verdict; none is given where the figure is not comparable (a model of another shape)."""
    target = TARGETS[name]
    return Row(
        target=target,
        figure=round(figure, 4),
        ours=round(ours, 4),
        ours_unit=unit,
        against=None if against is None else round(against, 4),
        is_met=is_met(figure, target.must, target.sense) if is_comparable else None,
        is_want_met=is_met(figure, target.want, target.sense) if is_comparable and target.want is not None else None,
        details=details,
    )


def not_measured(name: str, why_not: str) -> Row:
    return Row(target=TARGETS[name], why_not=why_not)


def is_met(figure: float, bound: float, sense: Sense) -> bool:
    """A bound itself is met."""
    return figure >= bound if sense == "at least" else figure <= bound
