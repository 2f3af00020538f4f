"""Compares the model with open loops that its fit has not seen. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median

import msgspec

from deploy.load.rounds import percentile
from deploy.simulation.costs import Inputs
from deploy.simulation.observations import Observations, Observed, Role, Turn
from deploy.simulation.runs import Machine
from deploy.simulation.writers import press_keys

MAX_ERROR = 0.15
SHARES = (0.5, 0.99)
NUM_PASSES = 2


class CheckRow(msgspec.Struct, frozen=True):
    """A load of the check: medians over the rounds.

    Attributes:
        name: of the load.
        num_answers: measured, in all rounds.
        num_refused: measured. Refused requests have no latency: with any, the percentiles are of the quicker ones.
        measured_ms, simulated_ms: p50 and p99.
    """

    name: str
    num_answers: int
    num_refused: int
    measured_ms: tuple[float, float]
    simulated_ms: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Simulated ÷ measured − 1, for p50 and p99."""
        (p50, p99), (simulated_p50, simulated_p99) = self.measured_ms, self.simulated_ms
        return simulated_p50 / p50 - 1, simulated_p99 / p99 - 1

    @property
    def is_met(self) -> bool:
        return not self.num_refused and all(abs(error) <= MAX_ERROR for error in self.errors)


class WriterRow(msgspec.Struct, frozen=True):
    """A load of live writers: p50 and p99, and the share of the keys that were answered."""

    name: str
    role: Role
    measured_ms: tuple[float, float]
    simulated_ms: tuple[float, float]
    measured_answered: float
    simulated_answered: float


def check(inputs: Inputs, observations: Observations) -> list[CheckRow]:
    """Simulate each turn of the check with its arrivals and its CPU times per answer, and compare."""
    return [_row(inputs, observations, load) for load in observations.of("check") if load.plan.rate_qps]


def check_writers(inputs: Inputs, observations: Observations) -> list[WriterRow]:
    """Simulate each load of writers with keys of its own: what was typed is random, so only averages can agree."""
    assert inputs.key is not None
    assert inputs.key_costs is not None
    rows = []
    for load in observations.loads:
        if not load.plan.num_writers:
            continue
        keys = press_keys(random.Random(1), load.plan.num_writers, load.plan.seconds)
        simulated = Machine(inputs, observations.num_slots).written(keys, inputs.key, inputs.key_costs)
        rows.append(
            WriterRow(
                load.plan.name,
                load.plan.role,
                _medians([_figures(turn) for turn in load.turns]),
                _figures(simulated),
                sum(len(turn.wall_ms) for turn in load.turns) / sum(_num_keys(turn) for turn in load.turns),
                len(simulated.wall_ms) / _num_keys(simulated),
            )
        )
    return rows


def _num_keys(turn: Turn) -> int:
    return len(turn.wall_ms) + turn.num_superseded + turn.num_failed


def _row(inputs: Inputs, observations: Observations, load: Observed) -> CheckRow:
    measured, simulated = [], []
    for turn in load.turns:
        measured.append(_figures(turn))
        simulated.append(_figures(simulate(inputs, observations.num_slots, turn)))
    num_answers = sum(len(turn.wall_ms) for turn in load.turns)
    num_refused = sum(turn.num_failed for turn in load.turns)
    return CheckRow(load.plan.name, num_answers, num_refused, _medians(measured), _medians(simulated))


def simulate(inputs: Inputs, num_slots: int, turn: Turn) -> Turn:
    """The arrivals of a measured turn, on cores as fast as its CPU times per answer show."""
    speeds: list[float] = []
    for _ in range(NUM_PASSES):  # how much an answer computes depends a little on the speed, by its batches
        simulated = Machine(inputs, num_slots, speeds).open(turn.offsets_s, inputs.fixed, inputs.costs)
        speeds = turn.speeds(simulated.cpu_s_per_answer)
    return Machine(inputs, num_slots, speeds).open(turn.offsets_s, inputs.fixed, inputs.costs)


def _figures(turn: Turn) -> tuple[float, float]:
    p50, p99 = (percentile(turn.wall_ms, share) for share in SHARES)
    return p50, p99


def _medians(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median(p50 for p50, _ in rows), median(p99 for _, p99 in rows)
