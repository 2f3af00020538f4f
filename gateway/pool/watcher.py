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

import structlog

from gateway.pool.admission import Admission
from gateway.pool.client import BranchError, SlotClient
from shared.plan import Plan
from shared.protocol import State

RECONNECT_S = 0.05
log = structlog.get_logger()


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
                    self._admission.update(index, state)
            except BranchError as error:
                reason = error.detail
            # Only a connection that has carried a state can be lost; a retry that fails leaves the first reason.
            if last is not None:
                log.warning("slot_lost", slot=index, reason=reason)
                self._admission.update(index, State(state="down", reason=reason))
                if last.state != "draining":
                    self.clients[index].abort_calls(BranchError("slot_lost", f"Its worker was lost: {reason}"))
            else:
                self._admission.reexamine()
            time.sleep(RECONNECT_S)
