"""What a branch does after a call that failed: another call at once, one after a pause, or none. Knows no thread, no
pool and no clock."""

from __future__ import annotations

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
        self.failure = error
        self.number += 1
        return error.is_retryable and self.number <= max_attempts
