"""Interleaved rounds of contenders, and the statistics of their samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from deploy.tuning.load.clients import Reply
from deploy.tuning.load.run import progress
from shared.errors import StartError
from tests.bench.results import Row, err


class Series(msgspec.Struct, frozen=True):
    """One contender's samples over all rounds, in `unit`."""

    label: str
    unit: str
    median: float
    min: float
    max: float
    samples: list[float]

    @classmethod
    def of(cls, label: str, unit: str, samples: Sequence[float]) -> Series:
        return cls(
            label=label,
            unit=unit,
            median=round(statistics.median(samples), 3),
            min=round(min(samples), 3),
            max=round(max(samples), 3),
            samples=[round(sample, 3) for sample in samples],
        )

    @property
    def row(self) -> Row:
        return {
            "series": self.label,
            "median": self.median,
            "min": self.min,
            "max": self.max,
            "unit": self.unit,
            "n": len(self.samples),
        }


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that is measured. `measure` runs it once and returns one round's samples by series name."""

    name: str  # of its first series
    label: str
    measure: Callable[[], Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Results:
    """Samples by series name, and by contender name the reasons why contenders failed."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, measure: Callable[[], Mapping[str, Sequence[float]]]) -> None:
        """Add a measurement that is not interleaved. If it fails, its reason is recorded and the run continues."""
        try:
            self.samples.update((series, [*values]) for series, values in measure().items())
        except StartError as error:
            self.failures[name] = _first_line(error)


def interleave(contenders: Sequence[Contender], num_rounds: int) -> Results:
    """All samples of `num_rounds` rounds, after one warm-up round whose samples are dropped.

    Each contender has one turn per round, so that other load on the machine affects all contenders alike; each round
    begins with another contender, so that none always follows the same one. A contender that fails once is left out
    with all its samples: those before the failure would be biased.
    """
    found: dict[str, dict[str, list[float]]] = {contender.name: {} for contender in contenders}
    failures: dict[str, str] = {}
    with progress(err, "Rounds", (num_rounds + 1) * len(contenders)) as on_turn:
        for number in range(-1, num_rounds if contenders else -1):
            first = max(0, number) % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                on_turn(contender.label)
                if contender.name in failures:
                    continue
                try:
                    turn = contender.measure()
                except StartError as error:
                    failures[contender.name] = _first_line(error)
                    continue
                for series, values in turn.items():
                    if number >= 0:
                        found[contender.name].setdefault(series, []).extend(values)
    kept = [samples for name, samples in found.items() if name not in failures]
    return Results({series: values for samples in kept for series, values in samples.items()}, failures)


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, linearly interpolated (type 7 of Hyndman and Fan)."""
    return float(np.percentile(samples, 100 * share))


def latencies(samples_ms: Sequence[float]) -> Row:
    """Percentiles and the number of samples, by heading."""
    shares = {"p50 ms": 0.5, "p90 ms": 0.9, "p99 ms": 0.99, "max ms": 1.0}
    return {**{name: round(percentile(samples_ms, share), 3) for name, share in shares.items()}, "n": len(samples_ms)}


def percent(part: float, whole: float) -> float | None:
    """A share in percent."""
    return round(100 * part / whole, 3) if whole else None


def _first_line(error: StartError) -> str:
    return str(error).partition("\n")[0]


def raise_for_status(replies: list[Reply]) -> list[Reply]:
    """The replies, if all have status 200.

    Raises:
        StartError: a request failed, so its time means nothing.
    """
    for reply in replies:
        if reply.status != 200:
            raise StartError(f"The server under test answered with status {reply.status} (0: connection lost).")
    return replies
