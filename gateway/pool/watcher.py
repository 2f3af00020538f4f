"""The gateway's view of the worker pool: a client per slot, and a thread per slot that follows its state.

The end of a slot's state stream means that its worker is down, at once: the master keeps the listener of a
worker that is being reborn, so a connect would succeed and wait.
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
    """Keeps `admission` told of every slot. `clients` are in slot order."""

    def __init__(self, plan: Plan, admission: Admission, ack_s: float) -> None:
        self.clients = [SlotClient(slot, ack_s) for slot in plan.slots]
        self._admission = admission
        for index in range(len(plan.slots)):
            threading.Thread(target=self._follow, args=(index,), name=f"state-{index}", daemon=True).start()

    def _follow(self, index: int) -> None:
        while True:
            reason = "its worker ended"
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
            if last is not None:
                log.warning("slot_lost", slot=index, reason=reason)
                self._admission.update(index, State(state="down", reason=reason))
            time.sleep(RECONNECT_S)
