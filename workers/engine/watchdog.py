"""The watchdog: notices that a step hangs, and ends the process where nothing else can.

A thread compares the time of the current step with its limit. A step that holds the interpreter lock stops that thread
too, so `faulthandler`, which needs no lock, ends the process a little later. Knows time and threads, not steps.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from contextlib import suppress

# `faulthandler` is armed again, or cancelled, only after this fraction of the limit has passed: it starts a thread each
# time. The watchdog's own thread looks as often.
REARM_FRACTION = 1 / 8
# Time that `on_hang` has to end the process before `faulthandler` does.
LAST_RESORT_S = 0.5


class Watchdog:
    """Watches one thread, which calls `arm`, `rest` and `disarm`."""

    def __init__(self, hang_s: float, on_hang: Callable[[], None]) -> None:
        """
        Args:
            hang_s: longest time between two calls of `arm`, within 1/8; 0 disables the watchdog.
            on_hang: called once, in the watchdog's thread; it should end the process.
        """
        self._hang_s = hang_s
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._armed_at = float("-inf")  # of faulthandler; -inf while disarmed. Guarded by the lock
        self._step_began_at: float | None = None
        self._thread: threading.Thread | None = None

    def arm(self, now: float) -> None:
        """A step begins: `hang_s` count from now.

        Args:
            now: `time.monotonic()` seconds.
        """
        if self._hang_s == 0:
            return
        self._step_began_at = now
        with suppress(RuntimeError):  # no thread can be started now: the next step tries again
            with self._lock:
                if now - self._armed_at > REARM_FRACTION * self._hang_s:
                    faulthandler.dump_traceback_later((1 + REARM_FRACTION) * self._hang_s + LAST_RESORT_S, exit=True)
                    self._armed_at = now
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                thread.start()
                self._thread = thread

    def rest(self) -> None:
        """No step runs until the next call of `arm`, which may follow at once: `faulthandler` is cancelled later."""
        self._step_began_at = None

    def disarm(self) -> None:
        """As `rest`; `faulthandler`, which has one timer for the whole process, is free for another watchdog."""
        self.rest()
        self._cancel_last_resort()

    def _cancel_last_resort(self) -> None:
        with self._lock:
            if self._step_began_at is None and self._armed_at > float("-inf"):
                faulthandler.cancel_dump_traceback_later()
                self._armed_at = float("-inf")

    def _watch(self) -> None:
        while True:
            time.sleep(REARM_FRACTION * self._hang_s)
            began_at = self._step_began_at
            self._cancel_last_resort()
            if began_at is not None and time.monotonic() - began_at > self._hang_s:
                faulthandler.dump_traceback()  # shows where it hangs
                self._on_hang()
                return
