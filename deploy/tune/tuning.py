"""One run of `tercet tune`: measures candidates until the search is complete, then recommends one.

Keeps every result in the state file, so that a run can be interrupted anywhere. Does not know how results are shown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console

from deploy.load.run import progress
from deploy.terminal import labelled
from deploy.tune.results import Candidate, Measurement
from deploy.tune.search import Choice, Goal, Search, Space, choose, continue_search, next_final
from deploy.tune.state import State
from deploy.tune.trial import Trial
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
    """

    plans: dict[Candidate, Measurement]
    num_passes: dict[Candidate, int]
    left_out: list[tuple[str, Candidate, str]]
    chosen: Choice | None


class Tuning:
    """One run. `run` may be called once."""

    def __init__(self, trial: Trial, space: Space, goal: Goal, state: State, budget: Budget, console: Console) -> None:
        self._trial, self._space, self._goal, self._state = trial, space, goal, state
        self._budget, self._console = budget, console

    def run(self) -> Result:
        """Measure candidates until the search is complete or the budget is spent."""
        search = self._measure_candidates()
        outcomes = self._state.outcomes
        plans = {candidate: outcome for candidate, outcome in outcomes.items() if not isinstance(outcome, str)}
        left_out = [("Not served", one, outcome) for one, outcome in outcomes.items() if isinstance(outcome, str)]
        left_out += [
            ("Not measured again" if one in plans else "Left out", one, reason) for one, reason in search.pruned.items()
        ]
        return Result(plans, self._state.num_passes, left_out, choose(outcomes, self._goal))

    def _measure_candidates(self) -> Search:
        """Returns the search as it was at its end."""
        longest_s = START_ESTIMATE_S + self._trial.duration_s  # of a candidate
        while True:
            outcomes = self._state.outcomes
            search = continue_search(self._space, outcomes, self._goal)
            final = next_final(outcomes, self._state.num_passes, self._goal)
            candidate, stage = (final, "The best two again") if search.next is None else (search.next, search.stage)
            if candidate is None:
                return search
            if outcomes and not self._budget.has(longest_s):
                search.pruned[candidate] = "--budget is spent; the same command continues"
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
