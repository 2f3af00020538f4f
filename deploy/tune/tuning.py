"""One run of `tercet tune`: measures candidates until the search is complete, then checks the best plan's prediction.

Keeps every result in the state file, so that a run can be interrupted anywhere. Does not know how results are shown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console

from deploy.load.run import progress
from deploy.terminal import labelled
from deploy.tune.check import Check, conclude, plan_rounds, run_rounds
from deploy.tune.results import Candidate, Measurement
from deploy.tune.search import Choice, Goal, Search, Space, choose, continue_search, next_final
from deploy.tune.state import State
from deploy.tune.trial import OPEN_LOOP_FACTOR, OPEN_SHARES, Trial
from shared.errors import StartError

START_ESTIMATE_S = 20.0  # of a server; with the first candidates there is nothing better


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds that a run may take."""

    seconds: float
    start_s: float = field(default_factory=time.monotonic)

    def has(self, needed_s: float) -> bool:
        return time.monotonic() - self.start_s + needed_s <= self.seconds


@dataclass(frozen=True, slots=True)
class Result:
    """What a run found.

    Attributes:
        num_passes: how often each plan was measured.
        left_out: triples of what happened, the plan, and why.
        chosen: None if no plan meets the goal.
        check: of the chosen plan.
    """

    plans: dict[Candidate, Measurement]
    num_passes: dict[Candidate, int]
    left_out: list[tuple[str, Candidate, str]]
    chosen: Choice | None
    check: Check | None


class Tuning:
    """One run. `run` may be called once."""

    def __init__(
        self,
        trial: Trial,
        space: Space,
        goal: Goal,
        state: State,
        budget: Budget,
        num_rounds: int,
        console: Console,
    ) -> None:
        """
        Args:
            num_rounds: of the check.
        """
        self._trial, self._space, self._goal, self._state = trial, space, goal, state
        self._budget, self._num_rounds, self._console = budget, num_rounds, console
        self._round_s = trial.seconds * (len(trial.clients) + OPEN_LOOP_FACTOR * (len(OPEN_SHARES) + 1))
        self._refuted: dict[Candidate, str] = {}

    def run(self) -> Result:
        """Measure candidates until the search is complete or the budget is spent, then check the best.

        A plan whose check contradicts the SLO is refuted, and the search continues without it.
        """
        while True:
            search = self._measure_candidates()
            chosen = choose(self._state.outcomes, self._goal, self._refuted)
            if chosen is None:
                return self._result(search, None, None)
            check = self._check_plan(chosen.candidate)
            measured, slo_ms = check.measured, self._goal.slo_ms
            if slo_ms is None or (measured.mean_ms <= slo_ms and not measured.num_errors):
                return self._result(search, chosen, check)
            self._refuted[chosen.candidate] = (
                f"its check: an average of {measured.mean_ms:.0f} ms and {measured.num_errors} errors at "
                f"{measured.load.rate_qps:g} requests/s"
            )

    def _measure_candidates(self) -> Search:
        """Returns the search as it was at its end."""
        longest_s = 0.0  # of a candidate
        while True:
            outcomes = self._state.outcomes
            search = continue_search(self._space, outcomes, self._goal, self._refuted)
            final = next_final(outcomes, self._state.num_passes, self._goal, self._refuted)
            candidate, stage = (final, "The best two again") if search.next is None else (search.next, search.stage)
            if candidate is None:
                return search
            check_s = START_ESTIMATE_S + self._num_rounds * self._round_s
            needed_s = check_s + (longest_s or START_ESTIMATE_S + self._round_s)
            if outcomes and not self._budget.has(needed_s):
                reason = "--budget: the remaining time is for the check; the same command continues"
                search.pruned[candidate] = reason
                return search
            started_s = time.monotonic()
            with progress(self._console, f"{stage}: {candidate}", self._trial.num_turns) as turn:
                try:
                    measurement = self._trial.measure(candidate, turn)
                except StartError as error:
                    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                    reason = " … ".join(dict.fromkeys((lines[0], lines[-1])))
                    self._state.add(candidate, failure=reason)
                    self._console.print(labelled("✗", "red", f"{candidate}: {reason}"))
                    continue
            self._state.add(candidate, measurement=measurement)
            longest_s = max(longest_s, time.monotonic() - started_s)
            self._console.print(labelled("✓", "green", f"{candidate}: {measurement}"))

    def _check_plan(self, candidate: Candidate) -> Check:
        plan = self._state.outcomes[candidate]
        assert not isinstance(plan, str)
        rounds = plan_rounds(plan, self._goal, self._num_rounds)
        total = 1 + self._num_rounds * len(rounds.loads)
        with progress(self._console, f"Checking {candidate}", total) as turn:
            done = run_rounds(
                self._trial, candidate, rounds, self._state, turn, lambda: not self._budget.has(self._round_s)
            )
        return conclude(plan, done)

    def _result(self, search: Search, chosen: Choice | None, check: Check | None) -> Result:
        outcomes = self._state.outcomes
        plans = {candidate: outcome for candidate, outcome in outcomes.items() if not isinstance(outcome, str)}
        left_out = [("Not served", one, outcome) for one, outcome in outcomes.items() if isinstance(outcome, str)]
        left_out += [
            ("Not measured again" if one in plans else "Left out", one, reason) for one, reason in search.pruned.items()
        ]
        left_out += [("Refuted", one, reason) for one, reason in self._refuted.items()]
        return Result(plans, self._state.num_passes, left_out, chosen, check)
