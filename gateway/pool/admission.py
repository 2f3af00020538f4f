"""The gateway's feedback_store: what each slot is doing, who waits for room, and who is refused.

A worker's own queue cannot be trusted with waiting (it would take requests it cannot serve), so no more
branches are ever in flight to a slot than its batch holds, and the rest wait here, in order, up to a bound.
Waiting is first come, first served among requests for one model; a request for another model is never held
behind it. This module knows no HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from gateway.pool.placement import SlotView, largest_wave, place
from shared.errors import ClientGone, DeadlineExceeded, NotReady, Overloaded, TercetError
from shared.plan import Plan
from shared.protocol import State
from shared.settings import Placement

Cancelling = Callable[[Callable[[], None]], AbstractContextManager[None]]
DOWN = State(state="down", reason="no answer from its worker yet")
RETRY_AFTER_S = 1
# More writers than this at once, and the oldest are forgotten: a prompt is then computed once more.
MAX_DOCUMENTS = 10_000


@dataclass(slots=True, eq=False)
class _Waiter:
    model: str
    num_branches: int
    avoid: Collection[int]
    is_retry: bool
    document: int | None
    granted: list[int] | None = None
    refused: TercetError | None = None
    woken: threading.Event = field(default_factory=threading.Event)


class Admission:
    """Reserves room in slots. Thread-safe."""

    def __init__(self, plan: Plan, policy: Placement, queue_bound: int) -> None:
        self._slots = plan.slots
        self._policy: Placement = policy
        self._queue_bound = queue_bound
        self._lock = threading.Lock()
        self._states: list[State] = [DOWN for _ in plan.slots]
        self._in_flight = [0 for _ in plan.slots]
        self._waiters: list[_Waiter] = []
        # Where a document's last branches went, the longest unused first.
        self._remembers: OrderedDict[int, int] = OrderedDict()

    def update(self, index: int, state: State) -> None:
        """Take note of what a slot's worker says of itself, or that it says nothing any more."""
        with self._lock:
            self._states[index] = state
            self._grant()

    def states(self) -> list[State]:
        with self._lock:
            return list(self._states)

    @property
    def num_waiting(self) -> int:
        """Branches that wait for room."""
        with self._lock:
            return self._num_waiting()

    def in_flight(self) -> list[int]:
        """Branches reserved, by slot."""
        with self._lock:
            return list(self._in_flight)

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
        """Wait for room for branches that start together; each slot returned must be released once.

        A request for more than there could ever be room for gets the largest wave, and reserves the rest one
        by one. A retry goes before the queue and is not counted in it: its request was admitted already.

        Args:
            deadline: of `time.monotonic()`.
            document: a number that requests for the same document share, so that they meet their cached prompt.
            cancelling: holds, while the block runs, what to call for the waiting to be given up.

        Raises:
            ClientGone: it was given up.
            Overloaded: too many branches wait already.
            NotReady: every slot of this model has failed to load.
            DeadlineExceeded: no room came in time.
        """
        with self._lock:
            waiter = _Waiter(model, num_branches, avoid, is_retry, document)
            if is_retry:
                self._waiters.insert(0, waiter)
            else:
                self._waiters.append(waiter)
            self._grant()
            if waiter.granted is None and not is_retry and self._num_waiting() > self._queue_bound:
                self._waiters.remove(waiter)
                raise Overloaded(
                    f"{self._num_waiting()} branches wait already and {self._queue_bound} may (TERCET_QUEUE); "
                    "try again shortly.",
                    retry_after_s=RETRY_AFTER_S,
                )
        with cancelling(partial(self._withdraw, waiter)):
            waiter.woken.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._grant()
        if waiter.refused is not None:
            raise waiter.refused
        if waiter.granted is None:
            raise DeadlineExceeded(
                f"No slot with {model} had room in time; allow a longer max_time, or serve it with more workers.",
                retry_after_s=RETRY_AFTER_S,
            )
        return waiter.granted

    def release(self, index: int) -> None:
        """Give back one branch's room in a slot."""
        with self._lock:
            self._in_flight[index] -= 1
            self._grant()

    def _withdraw(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                waiter.refused = ClientGone("Cancelled while it waited for room.")
                self._grant()
        waiter.woken.set()

    def _num_waiting(self) -> int:
        return sum(waiter.num_branches for waiter in self._waiters if not waiter.is_retry)

    def _views(self, model: str) -> list[SlotView]:
        return [
            SlotView(slot.index, self._in_flight[slot.index], slot.max_batch, state.ms_per_token)
            for slot, state in zip(self._slots, self._states, strict=True)
            if slot.model == model and state.state == "warm"
        ]

    def _grant(self) -> None:
        """Serve whom there is room for, in order; a model whose first waiter does not fit is passed over."""
        held_up: set[str] = set()
        for waiter in list(self._waiters):
            if waiter.model in held_up:
                continue
            failed = self._why_failed(waiter.model)
            prefer = None if waiter.document is None else self._remembers.get(waiter.document)
            slots = None
            if failed is None:
                views = self._views(waiter.model)
                wave = min(waiter.num_branches, largest_wave(views, self._policy))
                slots = place(views, wave, self._policy, waiter.avoid, prefer) if views else None
            if failed is None and slots is None:
                held_up.add(waiter.model)
                continue
            self._waiters.remove(waiter)
            if slots is None:
                waiter.refused = NotReady(f"{waiter.model} could not be loaded: {failed}", retry_after_s=RETRY_AFTER_S)
            else:
                waiter.granted = slots
                self._remember(waiter.document, slots[0])
                for index in slots:
                    self._in_flight[index] += 1
            waiter.woken.set()

    def _remember(self, document: int | None, slot: int) -> None:
        if document is None:
            return
        self._remembers[document] = slot
        self._remembers.move_to_end(document)
        if len(self._remembers) > MAX_DOCUMENTS:
            self._remembers.popitem(last=False)

    def _why_failed(self, model: str) -> str | None:
        """The reason, if every slot of a model has failed to load; waiting for them would be in vain."""
        states = [state for slot, state in zip(self._slots, self._states, strict=True) if slot.model == model]
        if all(state.state == "failed" for state in states):
            return states[0].reason or "the workers' log has the reason"
        return None
