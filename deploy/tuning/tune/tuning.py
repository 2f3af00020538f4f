"""One run of `tercet tune`: measures candidates until the search is complete, then recommends one.

Keeps every result in the state file, so that a run can be interrupted anywhere. Does not know how results are shown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console

from deploy.terminal import labelled
from deploy.tuning.load.run import progress
from deploy.tuning.tune.results import Candidate, Measurement
from deploy.tuning.tune.search import Choice, Goal, Search, Space, choose, next_final
from deploy.tuning.tune.state import State
from deploy.tuning.tune.trial import Trial
from shared.errors import StartError

START_ESTIMATE_S = 20.0  # of a server; with the first candidates there is nothing better


@dataclass(frozen=True, slots=True)
class Result:
    """What a run found.

    Attributes:
        num_passes: how often each plan was measured.
        left_out: triples of what happened, the plan, and why.
        chosen: None if no plan meets the goal.
        is_complete: the search ended by itself, not with its budget.
    """

    plans: dict[Candidate, Measurement]
    num_passes: dict[Candidate, int]
    left_out: list[tuple[str, Candidate, str]]
    chosen: Choice | None
    is_complete: bool


def find_plan(trial: Trial, space: Space, goal: Goal, state: State, budget_s: float, console: Console) -> Result:
    """Measure candidates until the search is complete or the budget is spent, and choose one."""
    search, is_complete = _measure_candidates(trial, space, goal, state, budget_s, console)
    outcomes = state.outcomes
    plans = {candidate: outcome for candidate, outcome in outcomes.items() if not isinstance(outcome, str)}
    left_out = [("Not served", one, outcome) for one, outcome in outcomes.items() if isinstance(outcome, str)]
    left_out += [
        ("Not measured again" if one in plans else "Left out", one, reason) for one, reason in search.pruned.items()
    ]
    return Result(plans, state.num_passes, left_out, choose(outcomes, goal), is_complete)


def _measure_candidates(
    trial: Trial, space: Space, goal: Goal, state: State, budget_s: float, console: Console
) -> tuple[Search, bool]:
    """Return the search as it was at its end, and whether it is complete."""
    deadline_s = time.monotonic() + budget_s
    longest_s = START_ESTIMATE_S + trial.duration_s  # of a candidate
    while True:
        outcomes = state.outcomes
        search = Search(space, outcomes, goal)
        final = next_final(outcomes, state.num_passes, goal)
        candidate, stage = (final, "The best two again") if search.next is None else (search.next, search.stage)
        if candidate is None:
            return search, True
        if outcomes and time.monotonic() + longest_s > deadline_s:
            search.pruned[candidate] = "--budget is spent; the same command continues"
            return search, False
        started_s = time.monotonic()
        with progress(console, f"{stage}: {candidate}", 1 + len(trial.loads)) as turn:
            try:
                measurement = trial.measure(candidate, turn)
            except StartError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                reason = " … ".join(dict.fromkeys((lines[0], lines[-1])))
                state.add(candidate, failure=reason)
                console.print(labelled("✗", "red", f"{candidate}: {reason}"))
                continue
        state.add(candidate, measurement=measurement)
        longest_s = max(longest_s, time.monotonic() - started_s)
        console.print(labelled("✓", "green", f"{candidate}: {measurement}"))
