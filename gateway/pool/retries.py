"""What a branch does after a call that failed: another call at once, one after a pause, or none; and what bounds the
retries of all requests together. Knows no request and no pool."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.pool.client import NO_SOCKET, BranchError

MAX_ATTEMPTS = 3
# Passes within a few steps: the gateway frees a cancelled sequence's room before the worker does.
SLOT_FULL = "slot_full"
NOT_READY = "not_ready"
# A request for which one worker's memory does not suffice may fit into another's. A worker ends after the second such
# failure in a row, so there is one retry, and none on the same slot.
SCARCE_MEMORY = "out_of_memory"
MAX_ATTEMPTS_AT_SCARCE_MEMORY = 2
# Pauses of a branch whose slot serves and yet cannot take it now, in turn; the last is repeated.
WAIT_PAUSES_S = (0.01, 0.025, 0.05, 0.1)
# How long it waits for a worker that is away for a moment: it looks for its socket once a second; and one that stops
# refuses until the gateway has read its state, which takes longest on a busy machine.
TRANSIENT_CODES = {NO_SOCKET, NOT_READY}
MAX_TRANSIENT_S = 3.0
# The window of `RetryBudget`.
WINDOW_S = 10.0
# Share of the started branches that may be retried.
MAX_RETRY_RATIO = 0.1
# The window is counted in steps, whose number bounds the memory.
STEP_S = 0.5


@dataclass(slots=True)
class Attempts:
    """The calls of one branch.

    A slot that is full has not failed: other gateways use it too, the one before a reload among them, or sequences
    whose clients have hung up end with its next step. The branch waits for room until its deadline. Nor has a slot
    failed whose worker is away for a moment (`TRANSIENT_CODES`).

    Attributes:
        started_at: `time.monotonic()` time.
        number: of the call that runs or is next, from 1; calls that found no room do not count.
        tried_slots: slots that have failed the branch, or had no room.
        failure: of the last call that counts.
    """

    started_at: float
    number: int = 1
    num_pauses: int = 0
    tried_slots: set[int] = field(default_factory=set)
    failure: BranchError | None = None

    @property
    def is_first(self) -> bool:
        """Whether there was no call before."""
        return self.number == 1 and not self.num_pauses

    def excludes(self, slot: int) -> bool:
        """Whether the slot must not be called, although no other has room."""
        return self.failure is not None and self.failure.code == SCARCE_MEMORY and slot in self.tried_slots

    def waits_after(self, slot: int, error: BranchError, now: float) -> float | None:
        """The pause before the same call is made again, because nothing has failed. None: it has failed."""
        self.tried_slots.add(slot)
        is_transient = error.code in TRANSIENT_CODES and now < self.started_at + MAX_TRANSIENT_S
        if error.code != SLOT_FULL and not is_transient:
            return None
        pause_s = WAIT_PAUSES_S[min(self.num_pauses, len(WAIT_PAUSES_S) - 1)]
        self.num_pauses += 1
        return pause_s

    def may_repeat_after(self, error: BranchError) -> bool:
        """Note that the call has failed. Returns whether another may follow."""
        max_attempts = MAX_ATTEMPTS_AT_SCARCE_MEMORY if error.code == SCARCE_MEMORY else MAX_ATTEMPTS
        self.failure = error.with_traceback(None)  # its frames hold this: a cycle, and its collection delays requests
        self.number += 1
        return error.is_retryable and self.number <= max_attempts


@dataclass(slots=True)
class _Step:
    begins_at: float
    num_started: int = 0
    num_retried: int = 0


class RetryBudget:
    """Bounds the retries of all requests together, so that a broken pool is not hammered with them. Counts branches
    over a sliding window of `WINDOW_S`. Thread-safe.

    After "Handling overload" in B. Beyer et al., "Site Reliability Engineering", O'Reilly 2016: where every call fails,
    a limit per request alone multiplies the load by the number of attempts.
    """

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
