"""Which workers a pool has: one per slot, and a successor of each during a reload.

Takes the place of three methods of gunicorn's arbiter, which counts workers and knows no slots: on SIGHUP it asks the
oldest workers to stop, whether or not theirs is the slot that has a successor, asks again at each turn of its loop, and
blocks until they have stopped. Here a worker is stopped only when its successor is warm. A successor that ends before
that changes nothing for its predecessor. Where a GPU's memory holds few successors, its slots are replaced one after
another. A reload ends when no slot has two processes any more; of the SIGHUPs that come before that, one further reload
follows. So a slot never has more than two. This module takes the arbiter as an object and does not import gunicorn.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from shared.errors import StartError
from shared.masters.leases import MANY_FAILURES, Leases
from shared.masters.worker_life import blocked_signals

# Exit code of a worker that cannot start while others of its pool live. gunicorn halts the whole pool on 3 and 4, its
# own codes of a worker that cannot start.
START_FAILED_EXIT_CODE = 75
# Exit code of the workers' master at the start of an instance, if no worker lives long enough to load its model.
WORKERS_DIED_EXIT_CODE = 76
# Pauses before a slot gets another worker, once `MANY_FAILURES` have died before they were warm: doubled each time. A
# worker pauses by itself before it loads; one that is killed while it imports cannot.
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 30.0
_NO_MEMORY = (
    "the GPU's memory does not hold a successor while the worker serves (`tercet plan` shows it): run `tercet reload`, "
    "which stops each worker before it loads the successor"
)
log = structlog.get_logger()


class Generations:
    """The workers of one pool, in its master. `gunicorn.conf.py` calls `lease` before and `free` after each of them."""

    def __init__(
        self,
        server: Any,
        num_slots: int,
        max_successors: Sequence[tuple[set[int], int]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            server: gunicorn's arbiter, whose `reload`, `manage_workers` and `stop` are replaced.
            max_successors: groups of slots that share a GPU, and how many of them may have a successor at a time;
                slots in no group all may.
            clock: monotonic seconds.
        """
        self.leases = Leases(num_slots)
        self._server = server
        self._num_slots = num_slots
        self._groups = [*max_successors]
        self._pending: set[int] = set()  # slots that a reload has yet to fork a successor for
        self._reload_waits = False  # SIGHUP came during a reload
        self._clock = clock
        self._fork_at: dict[int, float] = {}  # by slot: when its next worker may be forked
        self._slot = 0  # slot of the worker that is about to be forked
        self._incoming: dict[int, int] = {}  # by slot: age of the successor that is not yet warm
        self._stopped_ages: set[int] = set()  # workers that got SIGTERM because they are replaced
        self._stop = server.stop
        server.manage_workers = self.manage
        server.reload = self.reload
        server.stop = self.stop

    def lease(self, age: int) -> int:
        """Lease a slot to the worker `age`, and return it. To be called in the master, before the fork."""
        self.leases.lease(age, self._slot)
        return self._slot

    def free(self, slot: int, age: int) -> None:
        """Take a slot back from the worker `age`, whose process has ended."""
        is_warm = self.leases.is_warm(slot, age)
        self.leases.free(age)
        self._stopped_ages.discard(age)
        num_pauses = self.leases.num_failures(slot) - MANY_FAILURES
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**num_pauses) if num_pauses >= 0 else 0.0
        self._fork_at[slot] = self._clock() + pause_s
        if self._incoming.get(slot) == age:
            del self._incoming[slot]
            self._report(slot, "succeeded" if is_warm else "failed")

    @property
    def is_reloading(self) -> bool:
        """Whether a slot waits for its successor, or has two processes."""
        return bool(self._pending or self._incoming) or self._num_doubled(set(range(self._num_slots))) > 0

    def manage(self) -> None:
        """Fork a worker for each slot without one, and the successors that memory permits; stop replaced workers; begin
        the reload that waits."""
        for slot, age in list(self._incoming.items()):
            if self.leases.is_warm(slot, age):
                del self._incoming[slot]
                self._report(slot, "succeeded")
        for slot in range(self._num_slots):
            if not self.leases.holders(slot) and self._clock() >= self._fork_at.get(slot, 0.0):
                if slot in self._fork_at:  # a worker of it has ended
                    self.leases.count(slot, "restarts")
                self._fork(slot)
        self._fork_successors()
        for pid, worker in list(self._server.WORKERS.items()):
            is_replaced = self.leases.successor_is_warm(worker.slot_index, worker.age)
            if is_replaced and worker.age not in self._stopped_ages:
                self._stopped_ages.add(worker.age)
                self._server.kill_worker(pid, signal.SIGTERM)
        if self._reload_waits and not self.is_reloading:
            self.reload()

    def reload(self) -> None:
        """Read the configuration again and fork a successor for each slot; during a reload, do that after it. A wrong
        configuration changes nothing."""
        self._reload_waits = self.is_reloading
        if self._reload_waits:
            log.info("reload_postponed")
            return
        if (refusal := self._read_configuration()) is not None:
            for slot in range(self._num_slots):
                self._report(slot, "failed", reason=f"the configuration was refused: {refusal}")
            return
        for slot in range(self._num_slots):
            if any(slot in group and not most for group, most in self._groups):
                self._report(slot, "failed", reason=_NO_MEMORY)
            else:
                self._pending.add(slot)
        self._fork_successors()

    def stop(self, graceful: bool = True) -> None:
        """Stop all workers, whatever their generation."""
        self._pending.clear()
        self._reload_waits = False
        self.leases.mark_stopping()
        self._stop(graceful)

    def _read_configuration(self) -> str | None:
        """Let the arbiter take the configuration as it is now. If that is refused, restore what gunicorn has changed
        by then, and return the reason."""
        app = self._server.app
        before = dict(vars(app))
        try:
            app.reload()
            if app.cfg.workers != self._num_slots:
                raise StartError(f"it has {app.cfg.workers} slots instead of {self._num_slots}: restart `tercet serve`")
            self._server.setup(app)
        # gunicorn and `gunicorn.conf.py` refuse by SystemExit; an exception would end the master.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            vars(app).clear()
            vars(app).update(before)
            self._server.setup(app)
            return str(error.code if isinstance(error, SystemExit) else error)
        return None

    def _fork_successors(self) -> None:
        """Fork the successors of pending slots, as many as their GPUs hold."""
        for slot in sorted(self._pending):
            if all(self._num_doubled(group) < most for group, most in self._groups if slot in group):
                self._pending.remove(slot)
                if self._fork(slot):
                    self._incoming[slot] = self._server.worker_age
                else:
                    self._report(slot, "failed", reason="no process could be forked")

    def _num_doubled(self, slots: set[int]) -> int:
        """Slots of a group that more than one process holds. A predecessor keeps its memory until it has ended."""
        return sum(len(self.leases.holders(slot)) > 1 for slot in slots)

    def _fork(self, slot: int) -> bool:
        """Returns whether a worker was forked. If not, for lack of processes, memory or descriptors, the next turn of
        the arbiter's loop tries again."""
        self._slot = slot
        try:
            with blocked_signals():  # `WorkerLife.begin` admits them in the child
                self._server.spawn_worker()
        except OSError as error:
            log.error("fork_failed", slot=slot, reason=error.strerror)
            self.leases.free(self._server.worker_age)
            return False
        return True

    def _report(self, slot: int, outcome: str, **details: str) -> None:
        self.leases.count(slot, f"reloads.{outcome}")
        report = log.info if outcome == "succeeded" else log.error
        report("reload_finished", slot=slot, outcome=outcome, **details)
