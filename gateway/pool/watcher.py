"""Follows the state of every slot: one thread per slot reads the worker's state stream into `Admission`.

The end of the stream means that the worker is down. Nothing else shows it as early: the pool's master keeps the
listening socket of a dead worker, so a connect would succeed and then wait.

A worker that drains says so before it ends its stream, and finishes its branches. If the stream ends in any other way,
or is silent, the branches in progress are ended too, so that they are retried elsewhere and do not wait for a stopped
process until their deadline.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

import msgspec
import structlog

from gateway.pool.admission import Admission
from gateway.pool.client import BranchError, SlotClient
from shared.plan import Plan
from shared.protocol import State

RECONNECT_S = 0.05
_FAILURES = "failures."  # these keys of `State.counters`
log = structlog.get_logger()


class FailureTotals:
    """A slot's failures over all of its workers. A fatal one ends its worker before any scrape of the metrics."""

    def __init__(self) -> None:
        self._earlier: Counter[str] = Counter()  # of workers before the current
        self._current: Counter[str] = Counter()
        self._pid = 0

    def added_to(self, state: State) -> State:
        """The worker's state with the failures of the slot's earlier workers added."""
        if state.pid != self._pid:
            self._earlier += self._current
            self._pid, self._current = state.pid, Counter()
        if state.state != "down":
            counts = {key: count for key, count in state.counters.items() if key.startswith(_FAILURES)}
            self._current = Counter({key: int(count) for key, count in counts.items()})
        return msgspec.structs.replace(state, counters={**state.counters, **(self._earlier + self._current)})


class PoolWatcher:
    """Starts its threads, which run until the process exits. `clients` are in slot order."""

    def __init__(self, plan: Plan, admission: Admission, ack_s: float) -> None:
        """
        Args:
            ack_s: how long a call waits for the worker's acknowledgement.
        """
        self.clients = [SlotClient(slot, ack_s) for slot in plan.slots]
        self._admission = admission
        for index in range(len(plan.slots)):
            threading.Thread(target=self._follow, args=(index,), name=f"state-{index}", daemon=True).start()

    def _follow(self, index: int) -> None:
        failures = FailureTotals()
        while True:
            reason = "its worker closed the state stream"
            last: State | None = None
            try:
                for state in self.clients[index].states():
                    if last is None or state.state != last.state:
                        log.info(
                            "slot_state_changed", slot=index, state=state.state, reason=state.reason, pid=state.pid
                        )
                    last = state
                    self._admission.update(index, failures.added_to(state))
            except BranchError as error:
                reason = error.detail
            # Only a connection that has carried a state can be lost; a retry that fails leaves the first reason.
            if last is not None:
                log.warning("slot_lost", slot=index, reason=reason)
                self._admission.update(index, failures.added_to(State(state="down", reason=reason, pid=last.pid)))
                if last.state != "draining":
                    self.clients[index].abort_calls(BranchError("slot_lost", f"Its worker was lost: {reason}"))
            else:
                self._admission.reexamine()
            time.sleep(RECONNECT_S)
