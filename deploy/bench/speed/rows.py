"""The CPU rows of `tercet bench engine`, computed from the samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from deploy.bench.speed.targets import Row, measured, not_measured
from deploy.load.rounds import Results, percentile
from deploy.load.workload import Workload

NUM_CLIENTS = 16
NUM_WORDS = 2000
# Row: (Tercet's series, the series it is compared with, whether the figure is a speedup, not a ratio of times).
COMPARISONS = {
    "request": ("gateway", "a", True),
    "batched": ("gateway", "b-bf16", True),
    "engine": ("engine", "linears-request", False),
    "keystroke": ("keystroke", "linears-steps", False),
    "document": ("document", "document-linears-steps", False),
}
# The series that the other rows need.
SERIES = {
    "clients": ("clients", "linears-crowd"),
    "overhead": ("gateway",),
    "start": ("start",),
    "embedded": ("embedded",),
}


def cpu_rows(wanted: Sequence[str], results: Results, workload: Workload, *, is_comparable: bool) -> list[Row]:
    """A row for each wanted name; where a contender failed, a row with the reason.

    Args:
        is_comparable: whether the model has the shape that the targets are for.
    """
    rows = []
    # A measurement outside the rounds is named by its row, and all its series are missing if it fails.
    why_any = "; ".join(results.failures.values()) or "it was not run"
    for name in wanted:
        needed = SERIES.get(name) or COMPARISONS[name][:2]
        if missing := [series for series in needed if series not in results.samples]:
            rows.append(not_measured(name, f"{missing[0]} failed: {results.failures.get(missing[0], why_any)}"))
        else:
            rows.append(_row(name, results.samples, workload, is_comparable))
    return rows


def _row(name: str, samples: Mapping[str, Sequence[float]], workload: Workload, is_comparable: bool) -> Row:
    medians = {series: median(values) for series, values in samples.items()}
    if name in COMPARISONS:
        ours_name, other_name, is_speedup = COMPARISONS[name]
        ours, other = medians[ours_name], medians[other_name]
        figure = other / ours if is_speedup else ours / other
        # The target is for a document of full length.
        is_comparable &= name != "document" or len(samples[name]) >= NUM_WORDS
        return measured(
            name, figure, ours=ours, unit="ms", against=other, is_comparable=is_comparable,
            num_samples=len(samples[ours_name]),
        )  # fmt: skip
    if name == "clients":
        num_tokens = NUM_CLIENTS * workload.num_samples * workload.num_new_tokens
        ceiling = 1e3 * num_tokens / medians["linears-crowd"]
        ours = medians["clients"]
        return measured(
            name, ours / ceiling, ours=ours, unit="tokens/s", against=ceiling, is_comparable=is_comparable,
            share_of_cores_spent_by_clients=round(medians["clients-cost"], 4),
        )  # fmt: skip
    if name == "overhead":
        overhead = percentile(samples["gateway-overhead"], 0.5)
        return measured(name, overhead, ours=overhead, unit="ms", is_comparable=is_comparable)
    if name == "start":
        first = round(samples["start"][0], 3)
        return measured(name, medians["start"], ours=medians["start"], unit="s", first_start_s=first)
    return measured(name, medians["embedded"], ours=medians["embedded"], unit="ms")
