"""The gunicorn worker class of the worker pool: one process, one slot, two generations during a reload.

It decides when a process accepts and when it stops; it knows nothing of models but what the app tells it
(warm or not). A HUP makes gunicorn fork the new generation and stop the old at once; so that no request
falls between, the incoming worker accepts only when it is warm, and the outgoing defers its stop until then.
"""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import TYPE_CHECKING

from gunicorn.workers.gthread import ThreadWorker

if TYPE_CHECKING:
    from shared.slots import Leases, Slot
    from workers.app import SlotApp

# HTTP threads steal the interpreter from the engine thread for this long at a time; Python's default is 5 ms,
# the length of a decode step.
SWITCH_INTERVAL_S = 0.0005


class SlotWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no type hints
    """A `gthread` worker that holds a slot. `slot` and `leases` are set by `gunicorn.conf.py` before the fork."""

    slot: Slot
    leases: Leases
    wsgi: SlotApp
    alive: bool

    def init_process(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._is_outgoing = False
        self._is_drained = False
        self._is_warm = False
        # Sockets are shared with an older generation: while it serves, a request must not land here.
        self._has_elder = len(self.leases.holders(self.slot.index)) > 1
        try:
            super().init_process()  # serves until the end
        finally:
            self.wsgi.close()

    def load_wsgi(self) -> None:
        super().load_wsgi()
        self.wsgi.start(
            age=self.age,
            num_failures=self.leases.num_failures(self.slot.index),
            on_change=self._wake,
        )

    def _wake(self) -> None:
        """Run the main loop once more; callable from any thread."""
        self.method_queue.defer(lambda: None)

    def notify(self) -> None:
        """The heartbeat, once in each turn of the main loop: also where state changes are acted upon."""
        super().notify()
        if not self._is_warm and self.wsgi.is_warm:
            self._is_warm = True
            gc.freeze()  # what is loaded stays: to look through it for garbage takes 60 ms, and everything waits
            self.leases.mark_warm(self.slot.index, self.age)
            self.set_accept_enabled(self.alive)
        if self._is_outgoing and self.leases.successor_is_warm(self.slot.index, self.age):
            self.alive = False
        if not self.alive and not self._is_drained:
            self._is_drained = True
            self.wsgi.drain(self.cfg.graceful_timeout)

    def set_accept_enabled(self, enabled: bool) -> None:
        """An incoming generation does not accept before it is warm."""
        super().set_accept_enabled(enabled and (self._is_warm or not self._has_elder))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """TERM. An outgoing generation goes on until its successor is warm; a second TERM ends that."""
        if not self._is_outgoing and self.leases.is_superseded(self.slot.index, self.age):
            self._is_outgoing = True
            self._wake()
        else:
            super().handle_exit(sig, frame)
