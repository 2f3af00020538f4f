"""Serves a candidate plan and puts it under load: a real `tercet serve`, with its clients in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from deploy.tuning.load.clients import LOOPBACK, Clients
from deploy.tuning.load.server import Server
from deploy.tuning.load.workload import Workload
from deploy.tuning.tune.results import Candidate, Figures, Load, Measurement
from shared.process import proportional_set_size
from shared.setting_values import ModelSpec
from workers.checkpoints.resolve import Checkpoint

OnTurn = Callable[[str], None]
# Arrivals are random: an open loop needs more time than a closed one for a mean that can be relied on.
OPEN_LOOP_FACTOR = 2.0
SEED = 1


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


def _pss_bytes(pid: int) -> int:
    """The proportional set size of a process; 0 if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return proportional_set_size(pid)
    return 0
