"""Turn-taking and what is made of the times: interleaved rounds, medians, percentiles. Pure but for the clock."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from shared.errors import StartError


class Series(msgspec.Struct, frozen=True):
    """One contender's times over all rounds. Every number in `unit`."""

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


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that is timed. `measure` runs it and gives one round's samples, by the name of their series.

    `name` is the name of the first of them.
    """

    name: str
    label: str
    measure: Callable[[], Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Results:
    """Samples by series, and why contenders that failed have none, by their name."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, measure: Callable[[], Mapping[str, Sequence[float]]]) -> None:
        """Something that has no rounds; if it fails, its reason is kept and the rest goes on."""
        try:
            self.samples.update((series, [*values]) for series, values in measure().items())
        except StartError as error:
            self.failures[name] = str(error).partition("\n")[0]


def interleave(
    contenders: Sequence[Contender], num_rounds: int, on_turn: Callable[[str], None] = lambda _label: None
) -> Results:
    """All samples of `num_rounds` rounds, after one round that is not counted.

    In each round every contender has one turn, so that what else the machine does falls on all alike; each
    round begins with another contender, so that none always follows the same one. A contender that fails once
    is out, with what it had: half its times would be the better half.
    """
    found: dict[str, dict[str, list[float]]] = {contender.name: {} for contender in contenders}
    failures: dict[str, str] = {}
    for number in range(-1, num_rounds if contenders else -1):
        first = max(0, number) % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            on_turn(contender.label)
            if contender.name in failures:
                continue
            try:
                turn = contender.measure()
            except StartError as error:
                failures[contender.name] = str(error).partition("\n")[0]
                continue
            for series, values in turn.items():
                if number >= 0:
                    found[contender.name].setdefault(series, []).extend(values)
    samples = [samples for name, samples in found.items() if name not in failures]
    return Results({series: values for one in samples for series, values in one.items()}, failures)


def percentile(samples: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the samples lie, interpolated between neighbours (R's type 7)."""
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
