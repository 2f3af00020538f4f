"""What the engine does about a failure: which it survives, when a load is tried again, and how a hang is noticed.

    a load fails      tried again after a pause, unless the device has failed
    a step fails      fatal, unless it is one that a device recovers from and the first since a sequence drew its first
                      token
    a hang            fatal

After a fatal failure the process must end: what it computes may be wrong. Of a hang, a thread ends it, which compares
the time of the current step with its limit. A step that holds the interpreter lock stops that thread too, so
`faulthandler`, which needs no lock, ends the process a little later. Knows failures, time and prompts. Does not know
which exceptions mean which failure (`foreign_errors` does), and the device.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from workers.engine.failures import EngineFailure, Hang
from workers.engine.sequence import Sequence

FIRST_LOAD_PAUSE_S = 1.0  # doubled after each failed load
MAX_LOAD_PAUSE_S = 30.0
# Branches of a request, and the gateway's retries of them, reach a worker within milliseconds; a loaded machine takes
# longer.
MAX_SIBLING_DELAY_S = 1.0
# `faulthandler` is armed again, or cancelled, only after this fraction of the limit has passed: it starts a thread each
# time. The watchdog's own thread looks as often.
REARM_FRACTION = 1 / 8
# Time that `on_hang` has to end the process before `faulthandler` does.
LAST_RESORT_S = 0.5


def load_pauses() -> Iterator[float]:
    """Seconds to wait after the first failed load, after the second, and so on without end."""
    pause_s = FIRST_LOAD_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, MAX_LOAD_PAUSE_S)


def restart_pause_s(num_failures: int) -> float:
    """Seconds to wait before the first load of a process, after `num_failures` that died before they were warm."""
    return min(MAX_LOAD_PAUSE_S, FIRST_LOAD_PAUSE_S * 2 ** (num_failures - 1)) if num_failures else 0.0


def load_hang(load_s: float) -> Hang:
    """The failure of a load that took longer than `load_s`."""
    return Hang(
        f"The model was not loaded within {load_s:g} s; its worker is being replaced. If the disk or a first "
        "compilation of kernels needs longer, raise TERCET_LOAD_S."
    )


class StepFailures:
    """The failures of an engine's steps. For the engine's thread."""

    def __init__(self) -> None:
        self._has_just_failed = False  # no sequence drew its first token since the last failure
        self._failed_prompts: set[tuple[int, ...]] = set()  # of the sequences that a step could not compute last
        self._failed_at = float("-inf")

    def accept(self, failure: EngineFailure) -> None:
        """Accept a failure that the engine survives.

        Raises:
            EngineFailure: it is fatal, or the second without a sequence that has drawn its first token in between.
                Later tokens do not count: a running batch needs no new memory.
        """
        if self._has_just_failed or not failure.is_recoverable:
            raise failure
        self._has_just_failed = True

    def accept_of_sequences(self, failures: list[tuple[Sequence, EngineFailure]], now: float) -> EngineFailure:
        """Accept the failures of sequences that a step could not compute, which count as one.

        Those of siblings are one failure, whether or not they came in the same step: else a single request, whose
        branches do not arrive together, would end the process.

        Args:
            now: `time.monotonic()` seconds.

        Returns:
            The failure that they are.

        Raises:
            EngineFailure: as `accept`.
        """
        prompts = {sequence.prompt for sequence, _ in failures}
        failure = failures[0][1]
        if not (prompts <= self._failed_prompts and now - self._failed_at < MAX_SIBLING_DELAY_S):
            self.accept(failure)
            self._failed_prompts, self._failed_at = prompts, now
        return failure

    def count_first_tokens(self, number: int) -> None:
        """Record that sequences drew their first token in a step without a failure."""
        if number:
            self._has_just_failed = False


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
