"""Serves candidate plans until one can be recommended: each is a real `tercet serve` under load, with its clients in
this process. Does not know how results are shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console

from deploy.terminal import labelled
from deploy.tuning.load.clients import LOOPBACK, Clients
from deploy.tuning.load.run import progress
from deploy.tuning.load.server import Server
from deploy.tuning.load.workload import Workload
from deploy.tuning.tune.results import Candidate, Figures, Load, Measurement
from deploy.tuning.tune.search import Choice, Goal, Search, Space, choose
from deploy.tuning.tune.state import State
from shared.errors import StartError
from shared.process import proportional_set_size
from shared.setting_values import ModelSpec
from workers.checkpoints.resolve import Checkpoint

OnTurn = Callable[[str], None]
# Arrivals are random: an open loop needs more time than a closed one for a mean that can be relied on.
OPEN_LOOP_FACTOR = 2.0
SEED = 1
START_ESTIMATE_S = 20.0  # of a server; with the first candidates there is nothing better


@dataclass(frozen=True, slots=True)
class Trial:
    """How candidates are measured.

    Attributes:
        uses_gpu: whether the workers' memory is that of GPUs.
        settings: settings of every candidate, by lower-case name.
        clients: numbers of closed-loop clients.
        rate_qps: Poisson arrivals of an open loop, the load to tune for. None for no open loop.
        seconds: duration of a closed loop; an open loop takes `OPEN_LOOP_FACTOR` times as long.
    """

    model: ModelSpec
    subject: Checkpoint
    uses_gpu: bool
    workload: Workload
    settings: Mapping[str, str]
    clients: Sequence[int]
    rate_qps: float | None
    seconds: float

    def models(self, candidate: Candidate) -> str:
        """The value of TERCET_MODELS."""
        return str(ModelSpec(self.model.name, self.model.source, candidate.workers))

    @property
    def loads(self) -> list[Load]:
        closed = [Load(clients=number) for number in self.clients]
        return closed if self.rate_qps is None else [*closed, Load(rate_qps=self.rate_qps)]

    @property
    def duration_s(self) -> float:
        """Seconds under load."""
        return self.seconds * (len(self.clients) + OPEN_LOOP_FACTOR * (self.rate_qps is not None))

    def measure(self, candidate: Candidate, on_turn: OnTurn) -> Measurement:
        """
        Args:
            on_turn: called with a label while the plan is loaded, and before each load.

        Raises:
            StartError: the candidate cannot be served, or answers nothing.
        """
        on_turn("loading")
        with Server(self.models(candidate), {**self.settings, **candidate.settings()}) as server:
            clients = Clients(LOOPBACK, server.port, self.subject, self.workload, SEED)
            clients.send_concurrently(max(self.clients), 1)  # a warm-up
            figures = []
            for load in self.loads:
                on_turn(str(load))
                figures.append(self._run(clients, load))
            if self.uses_gpu:
                worker_bytes = max(slot["memory_bytes"] for slot in server.slots())
            else:
                worker_bytes = max(_pss_bytes(slot["pid"]) for slot in server.slots())
            total_bytes = sum(map(_pss_bytes, server.processes()))
            return Measurement(round(server.first_start_s, 2), worker_bytes, total_bytes, tuple(figures))

    def _run(self, clients: Clients, load: Load) -> Figures:
        """
        Raises:
            StartError: no request was answered.
        """
        if load.clients:
            return Figures.of(load, clients.send_for(load.clients, self.seconds))
        return Figures.of(load, clients.send_at_rate(load.rate_qps, self.seconds * OPEN_LOOP_FACTOR))


@dataclass(frozen=True, slots=True)
class Result:
    """What a run found.

    Attributes:
        left_out: triples of what happened, the plan, and why.
        chosen: None if no plan meets the goal.
        is_complete: the search ended by itself, not with its budget.
    """

    plans: dict[Candidate, Measurement]
    left_out: list[tuple[str, Candidate, str]]
    chosen: Choice | None
    is_complete: bool


def find_plan(trial: Trial, space: Space, goal: Goal, state: State, budget_s: float, console: Console) -> Result:
    """Measure candidates until the search is complete or the budget is spent, and choose one.

    Every result is kept in the state file, so that a run can be interrupted anywhere.
    """
    deadline_s = time.monotonic() + budget_s
    longest_s = START_ESTIMATE_S + trial.duration_s  # of a candidate
    outcomes = state.outcomes
    search = Search(space, outcomes, goal)
    is_complete = True
    for stage, candidate in search.plans():
        if outcomes and time.monotonic() + longest_s > deadline_s:
            search.pruned[candidate] = "--budget is spent; the same command continues"
            is_complete = False
            break
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
    plans = {one: outcome for one, outcome in outcomes.items() if not isinstance(outcome, str)}
    left_out = [("Not served", one, outcome) for one, outcome in outcomes.items() if isinstance(outcome, str)]
    left_out += [
        ("Not measured again" if one in plans else "Left out", one, reason) for one, reason in search.pruned.items()
    ]
    return Result(plans, left_out, choose(outcomes, goal), is_complete)


def _pss_bytes(pid: int) -> int:
    """The proportional set size of a process; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return proportional_set_size(pid)
    return 0
