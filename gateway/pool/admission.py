"""Admission: a request reserves room in slots for its branches, waits in a bounded queue, or is refused.

A worker's server would accept more requests than its engine can run and let them wait there. So the gateway never has
more branches in flight to a slot than the slot's batch holds; further requests wait here, where they are ordered,
bounded, cancellable and can still go to whichever slot becomes free first.

The queue is first come, first served within a model; a request never waits for another model's slots. This module
knows no HTTP and no text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from gateway.pool.affinity import DocumentAffinity
from gateway.pool.placement import largest_wave, place
from gateway.pool.slot_table import SlotTable
from shared.errors import ClientGone, DeadlineExceeded, NotReady, Overloaded, TercetError
from shared.plan import Plan
from shared.protocol import State
from shared.settings import Placement

Cancelling = Callable[[Callable[[], None]], AbstractContextManager[None]]
RETRY_AFTER_S = 1


@dataclass(slots=True, eq=False)
class _Reservation:
    """A request in the queue. It leaves the queue with either `slots` or `error` set, and then sets `settled`."""

    model: str
    num_branches: int
    avoid: Collection[int]
    is_retry: bool
    document: int | None
    slots: list[int] | None = None
    error: TercetError | None = None
    settled: threading.Event = field(default_factory=threading.Event)


class Admission:
    """Reserves room in slots. Thread-safe."""

    def __init__(self, plan: Plan, policy: Placement, queue_bound: int) -> None:
        """
        Args:
            queue_bound: branches that may wait; retries are not counted.
        """
        self._policy: Placement = policy
        self._queue_bound = queue_bound
        self._lock = threading.Lock()
        self._table = SlotTable(plan.slots)
        self._affinity = DocumentAffinity()
        self._queue: list[_Reservation] = []

    def update(self, index: int, state: State) -> None:
        """Set a slot's state, and place the waiting branches that it now has room for."""
        with self._lock:
            self._table.states[index] = state
            self._settle_queue()

    def states(self) -> list[State]:
        """The last state of each slot, in slot order."""
        with self._lock:
            return list(self._table.states)

    @property
    def num_waiting(self) -> int:
        """Branches in the queue, without retries."""
        with self._lock:
            return self._num_waiting()

    def in_flight(self) -> list[int]:
        """Reserved branches of each slot, in slot order."""
        with self._lock:
            return list(self._table.in_flight)

    def reserve(
        self,
        model: str,
        num_branches: int,
        deadline: float,
        *,
        avoid: Collection[int] = (),
        is_retry: bool = False,
        document: int | None = None,
        cancelling: Cancelling = lambda _cancel: nullcontext(),
    ) -> list[int]:
        """Wait until all branches have room at once, and reserve it.

        If the model's slots could not hold all branches even when idle, only the largest possible wave is reserved;
        the caller reserves the others one at a time.

        Args:
            deadline: on the clock of `time.monotonic()`.
            avoid: slots to use only if there is no other, because they have just failed this request.
            is_retry: placed before all waiting requests and not counted in the queue bound, since its request has
                been admitted already.
            document: a number that requests for the same document share (document affinity): they go to the slot
                that has the prompt in its prefix cache.
            cancelling: makes a context manager from a function that cancels the waiting; it is entered while the
                request waits.

        Returns:
            Slot indices in branch order, as many as were reserved; `release` each of them once.

        Raises:
            ClientGone: cancelled while waiting.
            Overloaded: the queue is full.
            NotReady: the model failed to load in all its slots.
            DeadlineExceeded: no room before the deadline.
        """
        reservation = _Reservation(model, num_branches, avoid, is_retry, document)
        with self._lock:
            if is_retry:
                self._queue.insert(0, reservation)
            else:
                self._queue.append(reservation)
            self._settle_queue()
            if not reservation.settled.is_set() and not is_retry and self._num_waiting() > self._queue_bound:
                self._queue.remove(reservation)
                raise Overloaded(
                    f"{self._num_waiting()} branches are waiting; the limit is {self._queue_bound} (TERCET_QUEUE). "
                    "Try again shortly.",
                    retry_after_s=RETRY_AFTER_S,
                )
        with cancelling(partial(self._cancel, reservation)):
            reservation.settled.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if reservation in self._queue:
                self._queue.remove(reservation)
                # It may have been the first of its model and too large for the room that the next fits into.
                self._settle_queue()
        if reservation.error is not None:
            raise reservation.error
        if reservation.slots is None:
            raise DeadlineExceeded(
                f"No slot of {model} had room before the deadline; allow a longer max_time, or run more workers.",
                retry_after_s=RETRY_AFTER_S,
            )
        return reservation.slots

    def release(self, index: int) -> None:
        """Give back the room of one branch in a slot."""
        with self._lock:
            self._table.release(index)
            self._settle_queue()

    def _cancel(self, reservation: _Reservation) -> None:
        with self._lock:
            if reservation in self._queue:
                self._queue.remove(reservation)
                reservation.error = ClientGone("Cancelled while waiting for a slot.")
                self._settle_queue()
        reservation.settled.set()

    def _num_waiting(self) -> int:
        return sum(reservation.num_branches for reservation in self._queue if not reservation.is_retry)

    def _settle_queue(self) -> None:
        """Place what fits and refuse what cannot be served, in queue order.

        The first reservation of a model that does not fit blocks those of the same model behind it: otherwise small
        requests could overtake a large one without end.
        """
        blocked_models: set[str] = set()
        for reservation in list(self._queue):
            if reservation.model in blocked_models:
                continue
            failure = self._table.load_failure(reservation.model)
            slots = None if failure is not None else self._place(reservation)
            if failure is not None:
                reservation.error = NotReady(
                    f"{reservation.model} could not be loaded: {failure}", retry_after_s=RETRY_AFTER_S
                )
            elif slots is not None:
                reservation.slots = slots
                self._table.reserve(slots)
                self._affinity.remember(reservation.document, slots[0])
            else:
                blocked_models.add(reservation.model)
                continue
            self._queue.remove(reservation)
            reservation.settled.set()

    def _place(self, reservation: _Reservation) -> list[int] | None:
        """Slots for the reservation's next wave, or None while there is no room for it."""
        views = self._table.views(reservation.model)
        if not views:
            return None
        wave = min(reservation.num_branches, largest_wave(views, self._policy))
        cached_on = self._affinity.slot_of(reservation.document)
        return place(views, wave, self._policy, reservation.avoid, cached_on)
