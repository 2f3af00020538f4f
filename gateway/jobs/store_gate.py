"""The gate before a job store: clients' calls pass while the store answers; while it hangs, one does.

A store that cannot be reached holds each caller until its own timeout, seconds later. The callers are threads of the
gateway, so without a gate a store that hangs takes as many threads as there are requests for jobs. The gate knows a
store only by how long its calls take.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from shared.errors import JobsUnavailable

# A call that takes longer than this shows that the store hangs. It is a little less than the least of the stores' own
# timeouts (2 s), so that a timeout counts as a hang, and a call that is only slow does not: a virtual disk of a busy
# machine took 1.2 s to sync 4 kB, whose median was 0.5 ms, and one call of SQLite 1.3 s.
STALL_S = 1.9
# After a hang one call finds out whether it is over, and the others wait for it this long: a store that answers does
# so in milliseconds, and the hang may have ended minutes ago.
TRIAL_S = 0.1
log = structlog.get_logger()


class StoreGate:
    """Bounds the calls in progress, and refuses instead of waiting while the store hangs. Thread-safe."""

    def __init__(self, max_calls: int) -> None:
        """
        Args:
            max_calls: calls in progress while the store answers.
        """
        self._max_calls = max_calls
        self._changed = threading.Condition()
        # Guarded by `_changed`.
        self._is_hanging = False  # the last call that ended took longer than `STALL_S`
        self._begun_at: dict[int, float] = {}  # of the calls in progress, oldest first
        self._numbers = itertools.count()

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Make a call in the block, after a wait of at most `STALL_S` for its turn, or `TRIAL_S` after a hang.

        No lock is held meanwhile.

        Raises:
            JobsUnavailable: the store hangs, and another call is finding out whether it still does.
        """
        number = self._enter()
        began_at = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began_at
            with self._changed:
                del self._begun_at[number]
                was_hanging, self._is_hanging = self._is_hanging, seconds > STALL_S
                self._changed.notify_all()
            if seconds > STALL_S and not was_hanging:  # explains the refusals meanwhile
                log.warning("job_store_hangs", seconds=round(seconds, 1))

    def _enter(self) -> int:
        with self._changed:
            while len(self._begun_at) >= (1 if self._is_hanging else self._max_calls):
                max_s = TRIAL_S if self._is_hanging else STALL_S
                left_s = next(iter(self._begun_at.values())) + max_s - time.monotonic()
                if left_s <= 0:
                    raise JobsUnavailable("The job store does not answer in time; try again shortly.")
                self._changed.wait(left_s)
            number = next(self._numbers)
            self._begun_at[number] = time.monotonic()
            return number
