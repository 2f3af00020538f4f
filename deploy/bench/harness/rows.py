"""From samples to the rows of the CPU table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from deploy.bench.harness.rounds import Results, percentile
from deploy.bench.harness.targets import Row, measured, not_measured
from deploy.bench.harness.workload import Workload

NUM_CLIENTS = 16
NUM_WORDS = 2000
# Row: (our series, the other's, is the figure the other's ÷ ours).
COMPARISONS = {
    "request": ("gateway", "a", True),
    "batched": ("gateway", "b-bf16", True),
    "engine": ("engine", "linears-request", False),
    "keystroke": ("keystroke", "linears-steps", False),
    "document": ("document", "document-linears-steps", False),
}
# What a row is made of, where it is no such comparison.
SERIES = {
    "clients": ("clients", "linears-crowd"),
    "overhead": ("gateway",),
    "start": ("start",),
    "embedded": ("embedded",),
}


def cpu_rows(wanted: Sequence[str], results: Results, workload: Workload, *, is_comparable: bool) -> list[Row]:
    """One row for each wanted one; not measured, with the reason, where a contender failed.

    Args:
        is_comparable: the model has the shape that the targets are for.
    """
    rows = []
    # What fails outside the rounds takes all of its series along.
    why_all = "; ".join(results.failures.values()) or "it was not run"
    for name in wanted:
        needed = SERIES.get(name) or COMPARISONS[name][:2]
        if missing := [one for one in needed if one not in results.samples]:
            rows.append(not_measured(name, f"{missing[0]} failed: {results.failures.get(missing[0], why_all)}"))
        else:
            rows.append(_row(name, results.samples, workload, is_comparable))
    return rows


def _row(name: str, samples: Mapping[str, Sequence[float]], workload: Workload, is_comparable: bool) -> Row:
    middle = {series: median(values) for series, values in samples.items()}
    if name in COMPARISONS:
        ours_name, other_name, is_speed_up = COMPARISONS[name]
        ours, other = middle[ours_name], middle[other_name]
        figure = other / ours if is_speed_up else ours / other
        # A shorter document is not the one that the target is for.
        is_comparable &= name != "document" or len(samples[name]) >= NUM_WORDS
        return measured(
            name, figure, ours=ours, unit="ms", against=other, is_comparable=is_comparable,
            num_samples=len(samples[ours_name]),
        )  # fmt: skip
    if name == "clients":
        num_tokens = NUM_CLIENTS * workload.num_samples * workload.num_new_tokens
        most = 1e3 * num_tokens / middle["linears-crowd"]
        ours = middle["clients"]
        return measured(
            name, ours / most, ours=ours, unit="tokens/s", against=most, is_comparable=is_comparable,
            share_of_cores_spent_by_clients=round(middle["clients-cost"], 4),
        )  # fmt: skip
    if name == "overhead":
        overhead = percentile(samples["gateway-overhead"], 0.5)
        return measured(name, overhead, ours=overhead, unit="ms", is_comparable=is_comparable)
    if name == "start":
        first = round(samples["start"][0], 3)
        return measured(name, middle["start"], ours=middle["start"], unit="s", first_start_s=first)
    return measured(name, middle["embedded"], ours=middle["embedded"], unit="ms")
