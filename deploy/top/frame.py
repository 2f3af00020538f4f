"""A frame of `tercet top`, drawn from answers of `GET /slots`. Pure: it knows neither HTTP nor the terminal's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.api.slots import SlotDetails, Slots

COLORS = {"warm": "green", "starting": "yellow", "loading": "yellow", "draining": "yellow"}
NUM_BAR_CELLS = 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An answer of `GET /slots`, and when it came, in `time.monotonic()` seconds."""

    slots: Slots
    at: float


def quantile(share: float, bounds_s: Sequence[float], counts: Sequence[int]) -> float | None:
    """The time in seconds that a share of the answers did not exceed, as Prometheus' `histogram_quantile` estimates.

    Args:
        counts: answers up to each bound, and of all.

    Returns:
        None if there was no answer.
    """
    rank = share * counts[-1]
    if not rank:
        return None
    index = next(index for index, count in enumerate(counts) if count >= rank)
    if index == len(bounds_s):
        return bounds_s[-1]
    lower, before = (bounds_s[index - 1], counts[index - 1]) if index else (0.0, 0)
    return lower + (bounds_s[index] - lower) * (rank - before) / (counts[index] - before)


def draw(title: str, earlier: Snapshot, now: Snapshot) -> RenderableType:
    """What happened between two snapshots of a server. A slot that is new, on another machine, counts from now."""
    seconds = (now.at - earlier.at) or 1.0  # of the first snapshot alone, all differences are 0
    counts = [
        count - before for count, before in zip(now.slots.answers.counts, earlier.slots.answers.counts, strict=True)
    ]
    if counts[-1] < 0:  # another gateway process, which counts from 0
        counts = now.slots.answers.counts
    then = {slot.slot: slot for slot in earlier.slots.slots}
    pairs = [(slot, then.get(slot.slot, slot)) for slot in now.slots.slots]
    bounds_s = now.slots.answers.bounds_s
    figures = {
        "requests/s": f"{counts[-1] / seconds:.1f}",
        "p50": _milliseconds(quantile(0.5, bounds_s, counts)),
        "p99": _milliseconds(quantile(0.99, bounds_s, counts)),
        "tokens/s": f"{sum(_growth(*pair, 'generated_tokens') for pair in pairs) / seconds:.0f}",
        "cached": _share(*(sum(_growth(*pair, name) for pair in pairs) for name in ("cached_tokens", "prompt_tokens"))),
        "waiting": str(now.slots.waiting),
    }
    summary = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in figures:
        summary.add_column(name, header_style="dim", no_wrap=True)
    summary.add_row(*(Text(value, "bold") for value in figures.values()))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("slot", "model", "device", "state"):
        table.add_column(name, no_wrap=True)
    table.add_column("branches", no_wrap=True)
    for name in ("tokens/s", "cached", "ms/step", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    reasons = []
    for slot, before in pairs:
        cached = _share(_growth(slot, before, "cached_tokens"), _growth(slot, before, "prompt_tokens"))
        rate = f"{_growth(slot, before, 'generated_tokens') / seconds:.0f}"
        table.add_row(
            str(slot.slot), slot.model, slot.device, _state(slot), _bar(slot), rate, cached,
            f"{slot.ms_per_token:.1f}", f"{slot.memory_bytes / 1e6:,.0f} MB",
        )  # fmt: skip
        if slot.reason:
            reasons.append(Text(f"slot {slot.slot}: {slot.reason}", "dim"))
    heading = Text.assemble((title, "bold"), (f"  over {seconds:.0f} s", "dim"))
    return Group(heading, "", summary, "", table, *reasons)


def _state(slot: SlotDetails) -> Text:
    text: str = slot.state
    if text == "warm":
        text = "serves" if _num_busy(slot) else "rests"
    elif text == "loading":
        text = "warms" if slot.progress == 1 else f"loads {slot.progress:.0%}"
    return Text(text, COLORS.get(slot.state, "red"))


def _bar(slot: SlotDetails) -> Text:
    """The part of the slot's batch that is in use, and the numbers."""
    if not slot.max_batch:
        return Text("")
    num_busy = _num_busy(slot)
    num_cells = min(NUM_BAR_CELLS, -(-NUM_BAR_CELLS * num_busy // slot.max_batch))
    return Text.assemble(
        ("█" * num_cells, "green"), ("░" * (NUM_BAR_CELLS - num_cells), "dim"), f" {num_busy}/{slot.max_batch}"
    )


def _num_busy(slot: SlotDetails) -> int:
    return max(slot.in_flight, slot.peak_in_flight)


def _growth(slot: SlotDetails, before: SlotDetails, counter: str) -> float:
    """How much a counter has grown. A new worker counts from 0."""
    start = before.counters.get(counter, 0) if slot.pid == before.pid else 0
    return slot.counters.get(counter, 0) - start


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _milliseconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.0f} ms"
