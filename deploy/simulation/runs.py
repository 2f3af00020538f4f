"""Simulated turns: the loads of a measurement, put on the model of its machine. Deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import simpy

from deploy.simulation.cores import Cores, Interpreter, Steps
from deploy.simulation.costs import Costs, Inputs, Kind
from deploy.simulation.model import Gateway, Request, Slot
from deploy.simulation.observations import SPAN_S, Turn
from deploy.simulation.writers import Key


class Machine:
    """A machine that serves by itself, as the measured one: a gateway, slots and the clients on the same cores."""

    def __init__(self, inputs: Inputs, num_slots: int, speeds: Sequence[float] = ()) -> None:
        """
        Args:
            speeds: of the cores, relative to those to which the costs belong, each for `SPAN_S`; empty: always 1.
        """
        self.env = simpy.Environment()
        self.cores = Cores(self.env, inputs.num_cores, inputs.costs.contention, speeds, SPAN_S)
        self.slots = [Slot(self.env, self.cores, inputs.max_batch) for _ in range(num_slots)]
        self.gateway = Gateway(self.env, self.cores, self.slots, inputs.queue)
        self.clients = Interpreter(self.env, self.cores)
        self.wall_ms: list[float] = []  # of the requests that were answered
        self.num_superseded = 0
        self.num_refused = 0

    def closed(self, num_clients: int, seconds: float, kind: Kind, costs: Costs) -> Turn:
        """Clients that send one request after another for so long."""

        def client() -> Steps:
            while self.env.now < seconds:
                yield from self.send(Request.of(self.env, kind, costs))

        return self._run([self.env.process(client()) for _ in range(num_clients)])

    def open(self, offsets_s: Sequence[float], kind: Kind, costs: Costs) -> Turn:
        """Requests at these times."""

        def arrive() -> Steps:
            sent = []
            for offset_s in offsets_s:
                yield self.env.timeout(offset_s - self.env.now)
                sent.append(self.env.process(self.send(Request.of(self.env, kind, costs))))
            yield self.env.all_of(sent)

        return self._run([self.env.process(arrive())])

    def written(self, keys: Sequence[Key], kind: Kind, costs: Costs) -> Turn:
        """Each key is a request of its writer's session."""

        def press() -> Steps:
            sent = []
            for key in keys:
                yield self.env.timeout(key.offset_s - self.env.now)
                sent.append(self.env.process(self.send(Request.of(self.env, kind, costs, key.writer))))
            yield self.env.all_of(sent)

        return self._run([self.env.process(press())])

    def send(self, request: Request) -> Steps:
        """A request, from the client's clock and back."""
        started_at = self.env.now
        yield from self.clients.run(request.costs.client_s / 2)
        self.env.process(self.gateway.answer(request))
        yield request.delivered
        yield from self.clients.run(request.costs.client_s / 2)
        if request.is_answered:
            self.wall_ms.append(1e3 * (self.env.now - started_at))
        self.num_superseded += request.is_superseded
        self.num_refused += request.is_refused

    def _run(self, processes: Sequence[simpy.Process]) -> Turn:
        self.env.run(self.env.all_of(processes))
        return Turn(
            wall_ms=self.wall_ms,
            num_superseded=self.num_superseded,
            num_failed=self.num_refused,
            elapsed_s=self.env.now,
            gateway_cpu_s=self.gateway.python.busy_s,
            workers_cpu_s=sum(slot.busy_s + slot.python.busy_s for slot in self.slots),
            client_cpu_s=self.clients.busy_s,
        )
