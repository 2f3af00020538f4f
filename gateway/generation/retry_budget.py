"""Bounds the retries of all requests together, so that a broken pool is not hammered with them.

After "Handling overload" in B. Beyer et al., "Site Reliability Engineering", O'Reilly 2016: where every call fails, a
limit per request alone multiplies the load by the number of attempts. Knows no request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 10.0
# Share of the started branches that may be retried.
MAX_RETRY_RATIO = 0.1
# The window is counted in steps, whose number bounds the memory.
STEP_S = 0.5


@dataclass(slots=True)
class _Step:
    begins_at: float
    num_started: int = 0
    num_retried: int = 0


class RetryBudget:
    """Counts branches over a sliding window of `WINDOW_S`. Thread-safe."""

    def __init__(self, min_retries: int, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            min_retries: allowed in a window, however few branches were started: a slot's batch, which is what the death
                of one worker can fail at once.
            clock: returns seconds.
        """
        self._min_retries = min_retries
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: deque[_Step] = deque()

    def add_branches(self, number: int) -> None:
        """Count branches that are started."""
        with self._lock:
            self._step().num_started += number

    def take_retry(self) -> bool:
        """Count a retry if the budget has room for it. Returns whether it had."""
        with self._lock:
            step = self._step()
            num_started = sum(step.num_started for step in self._steps)
            num_retried = sum(step.num_retried for step in self._steps)
            is_granted = num_retried < max(self._min_retries, MAX_RETRY_RATIO * num_started)
            step.num_retried += is_granted
            return is_granted

    def _step(self) -> _Step:
        now = self._clock()
        while self._steps and self._steps[0].begins_at <= now - WINDOW_S:
            self._steps.popleft()
        if not self._steps or self._steps[-1].begins_at <= now - STEP_S:
            self._steps.append(_Step(now))
        return self._steps[-1]
