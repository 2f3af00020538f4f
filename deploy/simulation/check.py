"""Compares the model with open loops that its fit has not seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import msgspec

from deploy.bench.harness.rounds import percentile
from deploy.simulation.costs import Inputs
from deploy.simulation.observations import Observations, Observed, Turn
from deploy.simulation.runs import Machine

MAX_ERROR = 0.15
SHARES = (0.5, 0.99)


class CheckRow(msgspec.Struct, frozen=True):
    """A load of the check: medians over the rounds.

    Attributes:
        name: of the load.
        num_answers: measured, in all rounds.
        measured_ms, simulated_ms: p50 and p99.
    """

    name: str
    num_answers: int
    measured_ms: tuple[float, float]
    simulated_ms: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Simulated ÷ measured − 1, for p50 and p99."""
        (p50, p99), (simulated_p50, simulated_p99) = self.measured_ms, self.simulated_ms
        return simulated_p50 / p50 - 1, simulated_p99 / p99 - 1

    @property
    def is_met(self) -> bool:
        return all(abs(error) <= MAX_ERROR for error in self.errors)


def check(inputs: Inputs, observations: Observations) -> list[CheckRow]:
    """Simulate each turn of the check with the arrivals that were measured, and compare."""
    speeds = round_speeds(observations)
    return [_row(inputs, observations, load, speeds) for load in observations.of("check") if load.plan.rate_qps]


def round_speeds(observations: Observations) -> dict[int, float]:
    """How fast the machine was in each round, relative to the median round: answers per second of its closed loops."""
    rates: dict[int, list[float]] = {}
    for load in observations.of("calibration"):
        if load.plan.num_clients:
            for turn in load.turns:
                rates.setdefault(turn.round, []).append(turn.answers_per_s / load.answers_per_s)
    return {number: fmean(of_round) for number, of_round in rates.items()}


def _row(inputs: Inputs, observations: Observations, load: Observed, speeds: Mapping[int, float]) -> CheckRow:
    measured, simulated = [], []
    for turn in load.turns:
        of_round = msgspec.structs.replace(inputs, speeds=[speeds.get(turn.round, 1.0)])
        measured.append(_figures(turn))
        simulated.append(
            _figures(Machine(of_round, observations.num_slots).open(turn.offsets_s, inputs.fixed, inputs.costs))
        )
    num_answers = sum(len(turn.wall_ms) for turn in load.turns)
    return CheckRow(load.plan.name, num_answers, _medians(measured), _medians(simulated))


def _figures(turn: Turn) -> tuple[float, float]:
    p50, p99 = (percentile(turn.wall_ms, share) for share in SHARES)
    return p50, p99


def _medians(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(p50 for p50, _ in rows), median(p99 for _, p99 in rows)
