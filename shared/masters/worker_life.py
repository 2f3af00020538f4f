"""The life of a worker process of either pool, and what a signal does in each phase of it.

    forked      signals wait: `Generations` blocks them before the fork, `begin` admits them
    importing   SIGTERM ends the process at once, by the kernel: it serves nothing, and an import cannot be interrupted
    loading     SIGTERM is recorded; the main loop acts on it
    warm        the same
    draining    SIGTERM again changes nothing. After the grace the kernel ends the process
    gone        the main loop has ended, and the process is about to

SIGINT, SIGQUIT and SIGABRT end the process at once in every phase. Signals that gunicorn's masters act on are ignored:
who sends them to all processes of a pool means the master. A handler records, and does nothing else: it may interrupt
any line, also one that holds a lock. This module knows signals and times; it imports neither gunicorn nor an app.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# From the end of the grace to the kernel's: the process ends by itself before, unless a thread hangs.
END_MARGIN_S = 0.5
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGALRM)
_IGNORED = (
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGTTIN,
    signal.SIGTTOU,
)


class LifePhase(enum.IntEnum):
    """In the order in which a worker goes through them; it may skip some."""

    FORKED = 0
    IMPORTING = 1
    LOADING = 2
    WARM = 3
    DRAINING = 4
    GONE = 5


class WorkerLife:
    """Made in the master, before the fork. All methods are for the main thread of the worker."""

    def __init__(self) -> None:
        self.phase = LifePhase.FORKED
        self._wake: Callable[[], None] = lambda: None
        self._term_at: float | None = None

    @property
    def must_drain(self) -> bool:
        """Whether SIGTERM was recorded and the main loop has yet to act on it."""
        return self._term_at is not None and self.phase < LifePhase.DRAINING

    @property
    def term_at(self) -> float | None:
        """The time of the first SIGTERM, in seconds of `time.monotonic()`."""
        return self._term_at

    def begin(self) -> None:
        """Give signals the actions of a process that imports. To be called after the fork, before anything is
        imported."""
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._enter(LifePhase.IMPORTING)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def load(self, wake: Callable[[], None]) -> None:
        """The app is imported, and a main loop acts on signals from now on.

        Args:
            wake: lets the main loop run once more; called by the signal handler.
        """
        self._wake = wake
        self._enter(LifePhase.LOADING)
        signal.signal(signal.SIGTERM, self._record)

    def warm(self) -> None:
        self._enter(LifePhase.WARM)

    def drain(self, grace_s: float) -> None:
        """The main loop stops. If the process has not ended after the grace, the kernel ends it."""
        self._enter(LifePhase.DRAINING)
        signal.setitimer(signal.ITIMER_REAL, grace_s + END_MARGIN_S)

    def end(self) -> None:
        """The main loop has ended. It cannot be woken any more."""
        self._wake = lambda: None
        self._enter(LifePhase.GONE)

    def _enter(self, phase: LifePhase) -> None:
        if phase <= self.phase:
            raise AssertionError(f"a worker that is {self.phase.name} does not become {phase.name}")
        self.phase = phase

    def _record(self, _number: int, _frame: FrameType | None) -> None:
        if self._term_at is None:
            self._term_at = time.monotonic()
            self._wake()


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Let signals wait, as in a process that forks: its child would lose them to the parent's handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDING, *_IGNORED, signal.SIGCHLD})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
