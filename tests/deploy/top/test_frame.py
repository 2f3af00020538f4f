"""What a frame of `tercet top` says of two answers of `/slots`."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from deploy.top.frame import Snapshot, draw, quantile
from gateway.api.slots import AnswerTimes, SlotDetails, Slots

BOUNDS_S = [0.1, 0.2, 0.4]


@pytest.mark.parametrize(
    ("share", "counts", "expected"),
    [
        (0.5, [0, 0, 0, 0], None),
        (0.5, [10, 10, 10, 10], 0.05),
        (0.5, [0, 10, 10, 10], 0.15),
        (0.99, [0, 0, 100, 100], 0.398),
        (0.5, [0, 0, 0, 10], 0.4),  # beyond the last bound
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(share: float, counts: list[int], expected: float | None) -> None:
    found = quantile(share, BOUNDS_S, counts)
    assert found == (None if expected is None else pytest.approx(expected))


def snapshot(at: float, counts: list[int], *slots: SlotDetails, waiting: int = 0) -> Snapshot:
    answers = AnswerTimes(bounds_s=BOUNDS_S, counts=counts)
    return Snapshot(Slots(slots=list(slots), waiting=waiting, answers=answers), at)


def slot(**fields: Any) -> SlotDetails:
    defaults = {"slot": 0, "state": "warm", "model": "small", "device": "cpu", "max_batch": 48, "peak_in_flight": 0}
    return SlotDetails(**{**defaults, **fields})


def drawn(earlier: Snapshot, now: Snapshot) -> str:
    file = io.StringIO()
    Console(width=120, file=file).print(draw("Tercet at http://a", earlier, now))
    return file.getvalue()


def test_rates_are_over_the_time_between_the_snapshots() -> None:
    before = slot(pid=7, counters={"generated_tokens": 100, "prompt_tokens": 50, "cached_tokens": 0})
    after = slot(
        pid=7, counters={"generated_tokens": 300, "prompt_tokens": 150, "cached_tokens": 75}, in_flight=3,
        memory_bytes=812_000_000, ms_per_token=4.25,
    )  # fmt: skip
    text = drawn(snapshot(10, [0, 2, 2, 2], before), snapshot(14, [0, 10, 10, 10], after, waiting=5))
    assert _figures(text) == ["2.0", "150 ms", "199 ms", "50", "75%", "5"]
    assert "serves" in text
    assert "3/48" in text
    assert "812 MB" in text
    assert "4.2" in text


def _figures(text: str) -> list[str]:
    heading, values = text.splitlines()[2:4]
    starts = [heading.index(name) for name in ("requests/s", "p50", "p99", "tokens/s", "cached", "waiting")]
    return [values[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def test_a_new_worker_and_a_new_gateway_count_from_zero() -> None:
    before = slot(pid=7, counters={"generated_tokens": 1000})
    after = slot(pid=8, counters={"generated_tokens": 20})
    text = drawn(snapshot(0, [90, 90, 90, 90], before), snapshot(2, [4, 4, 4, 4], after))
    assert _figures(text)[0] == "2.0"
    assert _figures(text)[3] == "10"


def test_states_and_reasons_are_shown() -> None:
    slots = [
        slot(slot=0), slot(slot=1, state="loading", progress=0.5), slot(slot=2, state="loading", progress=1.0),
        slot(slot=3, state="failed", reason="no such file"), slot(slot=4, peak_in_flight=48),
    ]  # fmt: skip
    alone = snapshot(0, [0, 0, 0, 0], *slots)
    text = drawn(alone, alone)
    for words in ("rests", "loads 50%", "warms", "failed", "serves", "slot 3: no such file", "█" * 16 + " 48/48"):
        assert words in text
