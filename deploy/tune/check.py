"""Checks the prediction of a plan at a load that was not used to make it.

In each round the plan is put under the loads that the prediction is made from and under the load of the check, so that
other load on the machine affects both alike. The figures of the check's load are not part of the fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from deploy.tune.prediction import LatencyModel, model_of
from deploy.tune.results import Candidate, Figures, Load, Measurement, medians
from deploy.tune.search import Goal, highest_rate
from deploy.tune.state import State
from deploy.tune.trial import OPEN_SHARES, OnTurn, Trial

CHECK_SHARE = 0.45  # of the capacity, where no load is given


class Check(msgspec.Struct, frozen=True):
    """The prediction and what was measured.

    Attributes:
        earlier_ms: predicted from the figures of the search, before the rounds of the check.
        predicted_ms: from the medians of the rounds, without the check's load.
        measured: medians of the rounds at the check's load.
        figures: medians of the rounds at the other loads.
    """

    num_rounds: int
    earlier_ms: float
    predicted_ms: float
    measured: Figures
    figures: tuple[Figures, ...]

    @property
    def error(self) -> float:
        """Measured ÷ predicted − 1."""
        return self.measured.mean_ms / self.predicted_ms - 1


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of a check: its load comes last."""

    loads: tuple[Load, ...]
    number: int


def plan_rounds(plan: Measurement, goal: Goal, number: int) -> Rounds:
    """The loads of a check. With a goal, the check's load is the goal's."""
    if goal.qps is not None:
        rate = goal.qps
    elif goal.slo_ms is not None:
        rate = highest_rate(plan, goal.slo_ms)
    else:
        rate = CHECK_SHARE * plan.capacity_qps
    rates = [*(share * plan.capacity_qps for share in OPEN_SHARES), rate]
    closed = [row.load for row in plan.closed]
    return Rounds((*closed, *(Load(rate_qps=round(rate, 2) or 0.01) for rate in rates)), number)


def run_rounds(
    trial: Trial,
    candidate: Candidate,
    rounds: Rounds,
    state: State,
    on_turn: OnTurn,
    is_over: Callable[[], bool],
) -> list[tuple[Figures, ...]]:
    """Runs the rounds that the state does not have yet, and returns all. One round is run even where time is over.

    Raises:
        StartError: the candidate cannot be served, or answers nothing.
    """
    done = state.rounds(candidate, rounds.loads)
    if len(done) < rounds.number:
        on_turn("loading")
        with trial.serve(candidate) as (_, clients):
            while len(done) < rounds.number and not (done and is_over()):
                figures = []
                for load in rounds.loads:
                    on_turn(f"round {len(done) + 1}: {load}")
                    figures.append(trial.run(clients, load))
                state.add(candidate, check=tuple(figures))
                done = state.rounds(candidate, rounds.loads)
    return done


def conclude(plan: Measurement, rounds: Sequence[tuple[Figures, ...]]) -> Check:
    """Compare prediction and measurement."""
    *figures, measured = (medians(rows) for rows in zip(*rounds, strict=True))
    rate_qps = measured.load.rate_qps
    return Check(
        num_rounds=len(rounds),
        earlier_ms=model_of(plan).open_ms(rate_qps),
        predicted_ms=LatencyModel.fit(figures).open_ms(rate_qps),
        measured=measured,
        figures=tuple(figures),
    )
