"""The model: gateways that place requests on slots, which compute them in batches. Knows no load and no statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import simpy

from deploy.simulation.cores import Cores, Interpreter, Steps
from deploy.simulation.costs import Costs, Kind
from workers.engine.scheduler import MAX_CHUNK, MAX_CHUNK_WITH_ROWS


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way. `ended` happens when it is computed, superseded or refused, `delivered` when the client has
    been answered.

    Attributes:
        session: of a live writer; None if nothing supersedes it.
    """

    kind: Kind
    costs: Costs
    ended: simpy.Event
    delivered: simpy.Event
    session: int | None = None
    is_superseded: bool = False
    is_refused: bool = False
    num_left: int = 0  # decode steps
    tokens_left: int = 0  # of the prompt

    @classmethod
    def of(cls, env: simpy.Environment, kind: Kind, costs: Costs, session: int | None = None) -> Request:
        return cls(kind, costs, simpy.Event(env), simpy.Event(env), session)

    @property
    def is_answered(self) -> bool:
        return not self.is_superseded and not self.is_refused

    def end(self, *, is_superseded: bool = False) -> None:
        if not self.ended.triggered:
            self.is_superseded = is_superseded
            self.ended.succeed()


class Slot:
    """A worker: an engine that advances all requests of its batch step by step, and the process around it."""

    def __init__(self, env: simpy.Environment, cores: Cores, max_batch: int) -> None:
        self.max_batch = max_batch
        self.in_flight = 0  # branches, as the gateways count them
        self.busy_s = 0.0  # the engine's CPU time so far
        self.num_prefills = 0
        self.python = Interpreter(env, cores)
        self._env = env
        self._cores = cores
        self._prompts: deque[Request] = deque()
        self._rows: list[Request] = []
        self._has_changed = False
        self._arrival = simpy.Event(env)
        env.process(self._run())

    def submit(self, request: Request) -> None:
        request.tokens_left, request.num_left = request.kind.prompt_tokens, request.kind.num_steps
        self.num_prefills += 1
        self._prompts.append(request)
        if not self._arrival.triggered:
            self._arrival.succeed()

    def _run(self) -> Steps:
        while True:
            # What has been superseded leaves before the next step.
            self._prompts = deque(request for request in self._prompts if not request.ended.triggered)
            self._rows = [request for request in self._rows if not request.ended.triggered]
            if not self._prompts and not self._rows:
                self._arrival = simpy.Event(self._env)
                yield self._arrival
                continue
            cpu_s, prompts, rows = self._step()
            self.busy_s += cpu_s
            yield self._cores.compute(cpu_s)
            for request in rows:
                request.num_left -= 1
            for request in prompts:
                self._prompts.remove(request)
            self._rows += prompts
            self._has_changed = bool(prompts)
            for request in (*rows, *prompts):
                if request.num_left <= 0:
                    request.end()
                    self._has_changed = True

    def _step(self) -> tuple[float, list[Request], list[Request]]:
        """CPU time of the next step, the requests whose prompt it completes, and those that it decodes."""
        rows = list(self._rows)
        cpu_s = 0.0
        if self._has_changed or self._prompts:
            cpu_s += max(request.costs.change_s for request in (*rows, *self._prompts))
        if rows:
            cpu_s += max(request.costs.step_s for request in rows)
            cpu_s += sum(request.costs.row_s * request.kind.num_rows for request in rows)
        num_tokens = MAX_CHUNK_WITH_ROWS if rows else MAX_CHUNK
        completed = []
        for request in self._prompts:
            chunk = min(num_tokens, request.tokens_left)
            if not chunk:
                break
            cpu_s += chunk * request.costs.prefill_s
            request.tokens_left -= chunk
            num_tokens -= chunk
            if not request.tokens_left:
                cpu_s += request.costs.prompt_s
                completed.append(request)
        return cpu_s, completed, rows


class Gateway:
    """Places requests on the least loaded slot with room; further ones wait, in the order of arrival, up to a bound."""

    def __init__(
        self, env: simpy.Environment, cores: Cores, slots: Sequence[Slot], queue: int, link_s: float = 0.0
    ) -> None:
        """
        Args:
            cores: of the gateway's machine.
            queue: branches that wait at most.
            link_s: time of a message between gateway and worker.
        """
        self.python = Interpreter(env, cores)
        self.num_arrived = 0
        self._env = env
        self._slots = slots
        self._queue_bound = queue
        self._link_s = link_s
        self._waiting: deque[tuple[Request, simpy.Event]] = deque()
        self._newest: dict[int, Request] = {}
        self._last_slot: dict[int, Slot] = {}

    def answer(self, request: Request) -> Steps:
        """The way of a request through gateway and worker."""
        costs = request.costs
        self.num_arrived += 1
        before_s = costs.waited_share * costs.gateway_s / 2
        after_s = costs.gateway_s - 2 * before_s
        yield from self.python.run(before_s)
        self._supersede(request)
        slot = yield from self._reserve(request)
        if slot is not None:
            yield from self._compute(request, slot)
            slot.in_flight -= request.kind.num_branches
            self._place_waiting()
        if not request.is_answered:
            yield from self.python.run(max(0.0, costs.superseded_share * costs.gateway_s - before_s))
            request.delivered.succeed()
            return
        yield from self.python.run(before_s)
        request.delivered.succeed()
        if request.session is not None and self._newest.get(request.session) is request:
            del self._newest[request.session]
        yield from self.python.run(after_s)

    def _compute(self, request: Request, slot: Slot) -> Steps:
        costs = request.costs
        waited_s = costs.waited_share * costs.worker_s / 2
        if self._link_s:
            yield self._env.timeout(self._link_s)
        yield from slot.python.run(waited_s)
        if not request.ended.triggered:
            slot.submit(request)
            yield request.ended
        after_s = costs.worker_s - 2 * waited_s
        if request.is_superseded:
            after_s = max(0.0, costs.superseded_share * costs.worker_s - 2 * waited_s)
        yield from slot.python.run(waited_s)
        self._env.process(slot.python.run(after_s))
        if self._link_s:
            yield self._env.timeout(self._link_s)

    def _supersede(self, request: Request) -> None:
        if request.session is None:
            return
        older = self._newest.get(request.session)
        self._newest[request.session] = request
        if older is not None:
            older.end(is_superseded=True)

    def _reserve(self, request: Request) -> Generator[simpy.Event, object, Slot | None]:
        slot = self._place(request)
        if slot is not None:
            return slot
        num_waiting = sum(each.kind.num_branches for each, _ in self._waiting)
        if num_waiting + request.kind.num_branches > self._queue_bound:
            request.is_refused = True
            request.end()
            return None
        placed = simpy.Event(self._env)
        entry = request, placed
        self._waiting.append(entry)
        yield placed | request.ended
        if placed.triggered:
            slot = placed.value
            assert isinstance(slot, Slot)
            return slot
        if entry in self._waiting:
            self._waiting.remove(entry)
        return None

    def _place(self, request: Request) -> Slot | None:
        """As `gateway.pool.placement`: the slot with the session's prompt unless it is busy, else the least loaded."""
        number = request.kind.num_branches
        free = [slot for slot in self._slots if slot.in_flight + number <= slot.max_batch]
        if not free:
            return None
        best = min(free, key=lambda slot: slot.in_flight)
        if request.session is not None:
            last = self._last_slot.get(request.session)
            if last in free and last.in_flight + number <= 2 * (best.in_flight + number):
                best = last
            self._last_slot[request.session] = best
        best.in_flight += number
        return best

    def _place_waiting(self) -> None:
        while self._waiting:
            request, placed = self._waiting[0]
            if not request.ended.triggered:
                slot = self._place(request)
                if slot is None:
                    return
                placed.succeed(slot)
            self._waiting.popleft()
