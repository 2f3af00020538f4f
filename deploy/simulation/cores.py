"""Computing in simulated time: work shares a machine's cores. Knows no requests."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from itertools import count

import simpy

# How long a thread computes before another one of its process does: each waits for sockets and other threads often.
TURN_S = 0.001
Steps = Generator[simpy.Event, object, None]


class Cores:
    """The cores of a machine, shared by all that computes (processor sharing).

    With more computations than cores each gets an equal share, as Linux gives threads; a computation is one thread and
    never faster than one core.
    """

    def __init__(
        self,
        env: simpy.Environment,
        num_cores: int,
        contention: float = 0.0,
        speeds: Sequence[float] = (),
        speed_s: float = 0.1,
    ) -> None:
        """
        Args:
            contention: how much longer computing takes, as a share, when all cores are busy.
            speeds: relative speeds of the machine, each for `speed_s`, over and over; empty: always 1.
        """
        self._env = env
        self._num_cores = num_cores
        self._contention = contention
        self.busy_s = 0.0  # core-seconds so far
        self._served_s = 0.0  # work that each computation has got since the start, while it ran
        self._updated_at = env.now
        self._running: list[tuple[float, int, simpy.Event]] = []  # by `_served_s` at the end
        self._numbers = count()
        self._timer = 0  # of the latest change; earlier timers are ignored
        self._speed = 1.0
        if speeds:
            env.process(self._replay(speeds, speed_s))

    def compute(self, cpu_s: float) -> simpy.Event:
        """An event that happens when this work is done."""
        done = simpy.Event(self._env)
        if cpu_s <= 0:
            return done.succeed()
        self._advance()
        heapq.heappush(self._running, (self._served_s + cpu_s, next(self._numbers), done))
        self._set_timer()
        return done

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _rate(self) -> float:
        """Work per second of each computation."""
        num_busy = min(len(self._running), self._num_cores)
        share_busy = (num_busy - 1) / (self._num_cores - 1) if self._num_cores > 1 else 0.0
        return self._speed * num_busy / len(self._running) / (1 + self._contention * share_busy)

    def _advance(self) -> None:
        now = self._env.now
        if self._running:
            self._served_s += (now - self._updated_at) * self._rate()
            self.busy_s += (now - self._updated_at) * min(len(self._running), self._num_cores)
        self._updated_at = now

    def _set_timer(self) -> None:
        self._timer += 1
        if self._running:
            left_s = max(0.0, self._running[0][0] - self._served_s)
            timeout = self._env.timeout(left_s / self._rate(), self._timer)
            timeout.callbacks.append(self._end_work)

    def _end_work(self, timer: simpy.Event) -> None:
        if timer.value != self._timer:
            return
        self._advance()
        served_s = max(self._served_s, self._running[0][0])  # against rounding
        while self._running and self._running[0][0] <= served_s:
            heapq.heappop(self._running)[2].succeed()
        self._set_timer()

    def _replay(self, speeds: Sequence[float], speed_s: float) -> Steps:
        while True:
            for speed in speeds:
                self._advance()
                self._speed = speed
                self._set_timer()
                yield self._env.timeout(speed_s)


class Interpreter:
    """A Python process: its threads compute one at a time, in turns."""

    def __init__(self, env: simpy.Environment, cores: Cores) -> None:
        self._lock = simpy.Resource(env, 1)
        self._cores = cores
        self.busy_s = 0.0  # CPU time so far

    def run(self, cpu_s: float) -> Steps:
        """Compute for so long, in turns with the other calls."""
        left_s = cpu_s
        while left_s > 0:
            with self._lock.request() as turn:
                yield turn
                while True:
                    turn_s = min(left_s, TURN_S)
                    yield self._cores.compute(turn_s)
                    self.busy_s += turn_s
                    left_s -= turn_s
                    if left_s <= 0 or self._lock.queue:
                        break
