"""The rows of `engine`: what each is required to show, and its figure computed from the samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from deploy.tuning.load.workload import Workload
from tests.bench.results import Row, cell
from tests.bench.rounds import Results

NUM_CLIENTS = 16
NUM_WORDS = 2000
Sense = Literal["≥", "≤"]


class Target(NamedTuple):
    """A row's bounds, in `unit`; `sense` says on which side of them a result is good.

    Attributes:
        series: Tercet's, and that of the times that it is compared with.
        is_speedup: the figure is not a ratio of times, but its inverse.
        is_for_small: the bounds are for GPT-2 small's shape.
    """

    title: str
    series: tuple[str, ...]
    sense: Sense
    required: float
    goal: float | None
    unit: str = "×"
    is_speedup: bool = False
    is_for_small: bool = True


W, STEPS = "W through the gateway, cold", "time ÷ linear layers of 19 steps"
TARGETS = {
    "request": Target(f"{W}: speedup over baseline (a)", ("gateway", "a"), "≥", 20, 29, is_speedup=True),
    "batched": Target(
        f"{W}: speedup over baseline (b), bf16",
        ("gateway", "b-bf16"),
        "≥",
        7,
        9,
        is_speedup=True,
    ),
    "engine": Target("W in the engine alone: time ÷ linear layers of W", ("engine", "linears-request"), "≤", 1.8, 1.4),
    "keystroke": Target(f"next keystroke at 512 tokens: {STEPS}", ("keystroke", "linears-steps"), "≤", 1.9, 1.5),
    "document": Target(f"next word, 2,000-word document: {STEPS}", ("document", "document-linears-steps"), "≤", 2, 1.5),
    "clients": Target(
        "16 closed-loop clients: tokens/s ÷ tokens/s of linear layers", ("clients", "linears-crowd"), "≥", 0.55, 0.75
    ),
    "overhead": Target("gateway and HTTP: request − engine time, p50", ("gateway-overhead",), "≤", 6, 4, "ms"),
    "start": Target("worker from fork to warm, embedded checkpoint", ("start",), "≤", 5, 3, "s", is_for_small=False),
    "embedded": Target(f"{W}, embedded checkpoint", ("embedded",), "≤", 60, None, "ms", is_for_small=False),
    "predict": Target(
        "W by the strategy predict: time ÷ W, embedded checkpoint",
        ("predict", "embedded"),
        "≤",
        1,
        None,
        is_for_small=False,
    ),
}


def rows(
    wanted: Sequence[str], results: Results, workload: Workload, *, is_small: bool
) -> tuple[list[Row], dict[str, str]]:
    """A row for each wanted name; and where a contender failed, the reason by name.

    Args:
        is_small: whether the model has GPT-2 small's shape.
    """
    found, missing = [], {}
    # A measurement outside the rounds is named by its row, and all its series are missing if it fails.
    why_any = "; ".join(results.failures.values()) or "it was not run"
    for name in wanted:
        lacking = [series for series in TARGETS[name].series if series not in results.samples]
        if lacking:
            missing[name] = f"{lacking[0]} failed: {results.failures.get(lacking[0], why_any)}"
        else:
            found.append(_row(name, results.samples, workload, is_small))
    return found, missing


def is_met(figure: float, bound: float, sense: Sense) -> bool:
    """A result equal to the bound meets it."""
    return figure >= bound if sense == "≥" else figure <= bound


def _row(name: str, samples: Mapping[str, Sequence[float]], workload: Workload, is_small: bool) -> Row:
    """A row with its verdicts, which are left out for a model of another shape."""
    target = TARGETS[name]
    own = samples[target.series[0]]
    ours, *others = (median(samples[series]) for series in target.series)
    unit = "ms" if target.unit == "×" else target.unit
    if name == "clients":
        unit = "tokens/s"
        others = [1e3 * NUM_CLIENTS * workload.num_samples * workload.num_new_tokens / others[0]]
    figure = ours
    for other in others:
        figure = other / ours if target.is_speedup else ours / other
    # The target of `document` is for one of full length.
    is_comparable = (is_small and (name != "document" or len(own) >= NUM_WORDS)) or not target.is_for_small
    verdicts: Row = {}
    for heading, bound in (("required", target.required), ("goal", target.goal)):
        text = "" if bound is None else f"{target.sense} {bound:g} {target.unit}"
        if bound is not None and is_comparable:
            text += ": met" if is_met(figure, bound, target.sense) else ": **not met**"
        verdicts[heading] = text
    return {
        "what": target.title,
        "Tercet": f"{cell(ours)} {unit} ({cell(min(own))}–{cell(max(own))})",
        "compared with": f"{cell(others[0])} {unit}" if others else "",
        "result": f"{cell(figure)} {target.unit}",
        **verdicts,
    }
