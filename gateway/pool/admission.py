"""Admission: a request reserves room in slots for its branches, waits in a bounded queue, or is refused.

A worker's server would accept more requests than its engine can run and let them wait there. So the gateway never has
more branches in flight to a slot than the slot's batch holds; further requests wait here, where they are ordered,
bounded, cancellable and can still go to whichever slot becomes free first.

Each model has a queue of its own in the waiting room: a request never waits for another model's slots. Retries of
admitted requests come before all queues. Long texts that are only to be tokenized have one queue, and one of them a
slot. This module knows no HTTP and no text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from gateway.pool.placement import Claim, DocumentAffinity, OwnerShares, place_on_one_revision
from gateway.pool.slot_table import MAX_DOWN_S, ServedModels, SlotTable
from gateway.waiting.room import FIRST_COME, LATEST_FIRST, Line, Waiter, WaitingRoom
from shared.cancellation import Cancelling
from shared.errors import ClientGone, DeadlineExceeded, NotReady, Overloaded, TercetError
from shared.plan import Plan, Slot
from shared.protocol import State
from shared.setting_values import Placement

# The queue of long texts. One is tokenized at a time: while the gateway reads and encodes the tokens of the largest, a
# MiB with a token for each byte, it holds some 250 MB, and other threads wait for the interpreter.
LONG_TEXTS = ("long texts",)


class _Reservation(Waiter, eq=False, kw_only=True):
    """A request that waits for slots. It gets `slots` or an error; neither: its deadline passed."""

    claim: Claim
    avoid: Collection[int]
    slots: list[int] | None = None
    settled: threading.Event | None = None  # None: its thread does not wait yet

    def wake(self) -> None:
        if self.settled is not None:
            self.settled.set()


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """A slot as it is now.

    Attributes:
        max_batch: branches that this gateway may have there.
        peak_in_flight: the most branches reserved there at a time, in about the last second.
    """

    slot: Slot
    state: State
    max_batch: int
    peak_in_flight: int

    @property
    def device(self) -> str:
        """ "" for a slot of another machine that has not reported it yet."""
        return self.slot.device or self.state.device


class Admission:
    """Reserves room in slots. Thread-safe.

    Attributes:
        models: what is known of the models being served.
    """

    def __init__(self, plan: Plan, policy: Placement, queue_bound: int, max_down_s: float = MAX_DOWN_S) -> None:
        """
        Args:
            plan: its models, and the slots to begin with.
            queue_bound: branches that may wait; retries are not counted.
            max_down_s: how long requests wait for a slot that is down.
        """
        self._policy: Placement = policy
        self._lock = threading.Lock()
        self._table = SlotTable(plan.slots, max_down_s)
        self._affinity = DocumentAffinity()
        self._room: WaitingRoom[_Reservation] = WaitingRoom(queue_bound)
        self.models = ServedModels(plan)
        self._shares = {model: OwnerShares() for model in self.models.names}
        self._has_long_text = False
        self._num_arrived = 0

    def add(self, slot: Slot) -> None:
        """Add a slot, of a model of the plan. Its state is unknown: it gets branches once it has reported."""
        with self._lock:
            self._table.add(slot)

    def set_leaving(self, index: int, is_leaving: bool) -> None:
        """A slot that leaves gets no further branches. Until it is removed, it may return."""
        with self._lock:
            self._table.entries[index].is_leaving = is_leaving
            self._settle_all()

    def remove(self, index: int) -> bool:
        """Remove a slot that leaves, once no branch runs there. Returns whether it is gone."""
        with self._lock:
            return self._table.remove(index)

    def update(self, index: int, state: State) -> None:
        """Set a slot's state, and place the waiting branches that it now has room for."""
        with self._lock:
            self._table.update(index, state)
            self.models.learn(self._table.entries[index].slot.model, state)
            self._settle_all()

    def reexamine(self) -> None:
        """Refuse the waiting requests whose model is no longer expected to become ready, which only time can show."""
        with self._lock:
            self._settle_all()

    def states(self) -> dict[int, State]:
        """The last state of each slot, by its index."""
        with self._lock:
            return self._table.states

    def slots(self) -> list[SlotStatus]:
        """All slots as they are now, in the order of their indices."""
        with self._lock:
            return [
                SlotStatus(entry.slot, self._table.reported_state(entry), entry.max_batch, peak)
                for entry, peak in zip(self._table.entries.values(), self._table.peaks, strict=True)
            ]

    def ready_models(self) -> set[str]:
        """Models whose requests are served now: they have a warm slot, or one that changes its worker."""
        with self._lock:
            return self._table.ready_models

    def capacity(self) -> int:
        """Branches that all slots together can run for this gateway."""
        with self._lock:
            return sum(entry.max_batch for entry in self._table.entries.values())

    @property
    def num_waiting(self) -> int:
        """Branches in the queues, without retries."""
        with self._lock:
            return self._room.size

    @property
    def num_arrived(self) -> int:
        """Reservations that were requested since the start."""
        with self._lock:
            return self._num_arrived

    def in_flight(self) -> list[int]:
        """Reserved branches of each slot, in slot order."""
        with self._lock:
            return self._table.in_flight

    def check(self, owner: str) -> None:
        """Refuse early, before the request is read, what `reserve` would refuse now for every model.

        Raises:
            Overloaded: the queue is full.
            NotReady: no model has a slot that serves it or is expected to.
        """
        with self._lock:
            room, names = self._room, self.models.names
            if not self._table.is_any_warm:
                refusals = [self._unavailability(model) for model in names]
                if all(refusals):
                    raise next(error for error in refusals if error)
            is_full = room.size >= room.bound and room.sizes.get(owner, 0) + 1 >= max(room.sizes.values(), default=0)
            if is_full and not any(self._has_room(model) for model in names):
                raise self._overloaded()

    def reserve(
        self,
        claim: Claim,
        num_branches: int,
        *,
        avoid: Collection[int] = (),
        is_retry: bool = False,
        cancelling: Cancelling = lambda _cancel: nullcontext(),
    ) -> list[int]:
        """Wait until all branches have room at once, and reserve it.

        If the model's slots could not hold all branches even when idle, only the largest possible wave is reserved;
        the caller reserves the others one at a time.

        Args:
            avoid: slots to use only if there is no other, because they have just failed this request.
            is_retry: one branch of a request that has been admitted already: placed before all waiting requests and
                not counted in the queue bound.
            cancelling: makes a context manager from a function that cancels the waiting; it is entered while the
                request waits.

        Returns:
            Slot indices in branch order, as many as were reserved; `release` each of them once.

        Raises:
            ClientGone: cancelled while waiting.
            Overloaded: the queue is full, and the owner has its share of it.
            NotReady: the model failed to load in all its slots, none of them is expected to become ready, or none was
                ready at the deadline.
            DeadlineExceeded: no room before the deadline, in slots that are ready.
        """
        reservation = _Reservation(
            owner=claim.owner,
            queue=LONG_TEXTS if claim.is_long_text else claim.model,
            cost=num_branches,
            size=num_branches,
            deadline=claim.deadline,
            kind=LATEST_FIRST if claim.has_session else FIRST_COME,
            is_urgent=is_retry and not claim.is_long_text,
            claim=claim,
            avoid=avoid,
        )
        with self._lock:
            self._num_arrived += 1
            self._shares[claim.model].note(claim.owner)
            self._room.enter(reservation)
            self._settle_all()
            while self._room.refuse_one(self._overloaded) is not None:
                self._settle_all()
            if reservation.is_waiting:
                reservation.settled = threading.Event()
        if reservation.settled is not None:
            with cancelling(partial(self._end, reservation, _cancellation)):
                reservation.settled.wait(max(0.0, claim.deadline - time.monotonic()))
            self._end(reservation, partial(self._lateness, claim.model))
        if reservation.error is not None:
            raise reservation.error
        assert reservation.slots is not None
        return reservation.slots

    def release(self, index: int, claim: Claim) -> None:
        """Give back the room of one branch in a slot."""
        with self._lock:
            self._table.release(index)
            self._shares[claim.model].add(claim.line, -1)
            self._has_long_text &= not claim.is_long_text
            claim.num_running -= 1
            if not claim.num_running and not claim.has_output:
                claim.revision = None
            self._settle_all()

    def _end(self, reservation: _Reservation, make_error: Callable[[], TercetError]) -> None:
        """Remove a request that still waits, and place those that it held back."""
        with self._lock:
            if reservation.is_waiting:
                self._room.settle(reservation, make_error())
                self._settle_all()

    def _lateness(self, model: str) -> TercetError:
        """Why a request got no slot before its deadline."""
        if self._table.groups(model):
            return DeadlineExceeded(
                f"No slot of {model} had room before the deadline; allow a longer max_time, or run more workers.",
            )
        return NotReady(
            f"No worker of {model} is ready ({self._table.describe(model)}). Repeat the request in a moment; "
            "GET /health/ready shows how far each has got.",
        )

    def _settle_all(self) -> None:
        """Place what fits and refuse what cannot be served.

        Retries first: each is a single branch, so one that does not fit need not hold back the others. In a queue the
        head holds back the others of its model until it fits; small requests could overtake it without end otherwise.
        An owner that must leave room to others holds back only its own requests.
        """
        for retry in list(self._room.urgent):
            self._try_to_settle(retry)
        for queue in (*self.models.names, LONG_TEXTS):
            passed: set[Line] = set()
            while self._room.waiting and (head := self._room.head(queue, passed)) is not None:
                if self._must_wait(head):
                    passed.add(head.line)
                elif not self._try_to_settle(head):
                    break

    def _must_wait(self, reservation: _Reservation) -> bool:
        """Whether a request must wait although there may be room."""
        claim = reservation.claim
        if claim.is_long_text:
            return self._has_long_text
        return self._shares[claim.model].must_wait(
            claim.line, reservation.cost, partial(self._shared_capacity, claim.model), self._room.sizes
        )

    def _shared_capacity(self, model: str) -> int:
        """Branches that a model's slots may hold together while owners use them that want no more than their share."""
        return sum(slot.shared_batch for group in self._table.groups(model) for slot in group)

    def _try_to_settle(self, reservation: _Reservation) -> bool:
        claim = reservation.claim
        slots = place_on_one_revision(
            self._table.groups(claim.model, claim.revision),
            reservation.cost,
            self._policy,
            reservation.avoid,
            self._affinity.slot_of(claim.document),
        )
        if slots is not None:
            claim.revision = self._table.entries[slots[0]].state.revision
            claim.num_running += len(slots)
            self._table.reserve(slots)
            self._shares[claim.model].add(claim.line, len(slots))
            self._affinity.remember(claim.document, slots[0])
            self._has_long_text |= claim.is_long_text
            reservation.slots = slots
            self._room.settle(reservation)
        elif (refusal := self._unavailability(claim.model, claim)) is not None:
            self._room.settle(reservation, refusal)
        return not reservation.is_waiting

    def _unavailability(self, model: str, claim: Claim | None = None) -> NotReady | None:
        """Why waiting for this model, or for the weights that the request began with, is pointless, else None."""
        revision = None if claim is None else claim.revision
        if self._table.is_expected(model, revision):
            return None
        if (failure := self._table.load_failure(model)) is not None:
            return NotReady(f"{model} could not be loaded: {failure}")
        if claim is not None and revision is not None and self._table.is_expected(model):
            if not claim.has_output and claim.num_running:
                return None  # if these branches fail too, the request may start again with other weights
            return NotReady(
                f"No slot has the version of {model} any more that this answer began with; repeat the request.",
            )
        return NotReady(
            f"No worker of {model} is ready ({self._table.describe(model)}), and none is expected soon; it may stay so "
            "until an operator acts. GET /health/ready shows the state of each; the workers' log has the reason.",
        )

    def _has_room(self, model: str) -> bool:
        """Whether a request of the fewest branches would be placed at once."""
        views = (view for group in self._table.groups(model) for view in group)
        return self._room.is_empty(model) and any(view.room() > 0 for view in views)

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"The queue is full: at most {self._room.bound} branches may wait (TERCET_QUEUE). Try again shortly.",
        )


def _cancellation() -> ClientGone:
    return ClientGone("Cancelled while waiting for a slot.")
