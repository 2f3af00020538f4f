"""Serves a candidate plan and puts it under load: a real `tercet serve`, with clients in a process of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from deploy.load.clients import LOOPBACK, LoadResult
from deploy.load.contender_process import ContenderProcess
from deploy.load.memory import GpuMemory, pss_bytes
from deploy.load.server import Server
from deploy.load.workload import Subject, Workload
from deploy.tune.results import Candidate, Figures, Load, Measurement
from shared.settings import ModelSpec

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
    subject: Subject
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
    def num_turns(self) -> int:
        """Turns of `measure`."""
        return 1 + len(self.clients) + (self.rate_qps is not None)

    @property
    def duration_s(self) -> float:
        """Seconds under load."""
        return self.seconds * (len(self.clients) + OPEN_LOOP_FACTOR * (self.rate_qps is not None))

    def measure(self, candidate: Candidate, on_turn: OnTurn) -> Measurement:
        """
        Raises:
            StartError: the candidate cannot be served, or answers nothing.
        """
        loads = [Load(clients=number) for number in self.clients]
        if self.rate_qps is not None:
            loads.append(Load(rate_qps=self.rate_qps))
        on_turn("loading")
        gpu_memory = GpuMemory() if self.uses_gpu else None
        with self.serve(candidate) as (server, clients):
            figures = []
            for load in loads:
                on_turn(str(load))
                figures.append(self.run(clients, load))
            workers = server.worker_pids()
            if gpu_memory is None:
                worker_bytes = max(pss_bytes([pid]) for pid in workers)
            else:
                worker_bytes = gpu_memory.process_bytes(workers) // len(workers)
            total_bytes = pss_bytes(server.processes())
            return Measurement(round(server.first_start_s, 2), worker_bytes, total_bytes, tuple(figures))

    @contextmanager
    def serve(self, candidate: Candidate) -> Iterator[tuple[Server, ContenderProcess]]:
        """A warm server with this plan, which has answered a request of each client, and the clients' process."""
        factory = "deploy.load.clients:Clients"
        with (
            Server(self.models(candidate), {**self.settings, **candidate.settings()}) as server,
            ContenderProcess(factory, LOOPBACK, server.port, self.subject, self.workload, SEED, {}) as clients,
        ):
            clients.call("send_concurrently", max(self.clients), 1)
            yield server, clients

    def run(self, clients: ContenderProcess, load: Load) -> Figures:
        """
        Raises:
            StartError: no request was answered.
        """
        result: LoadResult
        if load.clients:
            result = clients.call("send_for", load.clients, self.seconds)
        else:
            result = clients.call("send_at_rate", load.rate_qps, self.seconds * OPEN_LOOP_FACTOR)
        return Figures.of(load, result)
