"""A waiting room: requests wait for something that is given out one after the other, a thread or room in slots.

It is bounded, and fair between owners (API keys, or addresses). A request in it is settled once: it is served, or it
ends with an error because it was cancelled, is late, or would be served last of the owner that has the most in a room
that is full. Knows neither HTTP nor models, and nothing of what is waited for.

No lock: the caller uses a room from one thread, or holds a lock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.waiting.fair_queue import FairQueue, Line
from shared.errors import TercetError


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter:
    """A request that waits.

    Attributes:
        owner: requests of one owner count together.
        queue: requests of one queue wait for the same; none waits for those of another.
        cost: part of its owner's turn that it takes to be served.
        size: what it counts in the bound of the room.
        deadline: `time.monotonic()` time.
        is_latest_first: of its owner's requests of this kind in the queue, the latest is served first.
        is_urgent: it is not in a queue, but before all of them, and does not count in the bound.
        error: why it was not served.
    """

    owner: str
    queue: Hashable = None
    cost: int = 1
    size: int = 1
    deadline: float
    is_latest_first: bool = False
    is_urgent: bool = False
    number: int = 0
    is_waiting: bool = False
    error: TercetError | None = None

    def wake(self) -> None:
        """Called when it has been settled."""


W = TypeVar("W", bound=Waiter)


class WaitingRoom(Generic[W]):
    """Requests in several queues with one bound."""

    def __init__(self, bound: int) -> None:
        """
        Args:
            bound: sizes of all that wait in the queues, together.
        """
        self.bound = bound
        self._queues: defaultdict[Hashable, FairQueue[W]] = defaultdict(FairQueue)
        self._waiting: dict[W, None] = {}  # in the queues, in the order of arrival
        self._urgent: dict[W, None] = {}  # also in the order of arrival
        self._sizes: Counter[str] = Counter()  # by owner; none is 0
        self._num_entered = 0

    @property
    def sizes(self) -> Mapping[str, int]:
        """What waits in the queues, by owner."""
        return self._sizes

    @property
    def size(self) -> int:
        return self._sizes.total()

    @property
    def urgent(self) -> Collection[W]:
        """Those before all queues, in the order of arrival."""
        return list(self._urgent)

    def __len__(self) -> int:
        """Requests in the queues."""
        return len(self._waiting)

    def is_empty(self, queue: Hashable) -> bool:
        return not self._queues[queue]

    def late(self, now: float) -> list[W]:
        """The requests in the queues whose deadline has passed."""
        return [waiter for waiter in self._waiting if now > waiter.deadline]

    def enter(self, waiter: W) -> None:
        """Add a request."""
        self._num_entered += 1
        waiter.number, waiter.is_waiting = self._num_entered, True
        if waiter.is_urgent:
            self._urgent[waiter] = None
        else:
            self._waiting[waiter] = None
            self._queues[waiter.queue].append(waiter)
            self._sizes[waiter.owner] += waiter.size

    def head(self, queue: Hashable, passed: Collection[Line] = ()) -> W | None:
        """The request of a queue to serve next, as `FairQueue.head`."""
        return self._queues[queue].head(passed)

    def settle(self, waiter: W, error: TercetError | None = None) -> None:
        """End the waiting of a request, which does wait: it is served now, or ends with an error."""
        if waiter.is_urgent:
            del self._urgent[waiter]
        else:
            del self._waiting[waiter]
            queue = self._queues[waiter.queue]
            (queue.serve if error is None else queue.remove)(waiter)
            self._sizes[waiter.owner] -= waiter.size
            if not self._sizes[waiter.owner]:
                del self._sizes[waiter.owner]
        waiter.is_waiting, waiter.error = False, error
        waiter.wake()

    def refuse_one(self, make_error: Callable[[], TercetError]) -> W | None:
        """While more wait than the bound permits, refuse one, and return it.

        Longest queue drop: it is of the owner that has the most, so one that has less than its share is not refused
        because others have filled the room. B. Suter et al., "Design considerations for supporting TCP with per-flow
        queueing", INFOCOM 1998. Of this owner's requests it is the newest of those that would be served last; among
        owners that have equal amounts, that of the newest request.
        """
        if self.size <= self.bound:
            return None
        most = max(self._sizes.values())
        owners = [owner for owner, size in self._sizes.items() if size == most]
        last = [waiter for queue in self._queues.values() for owner in owners for waiter in queue.last(owner)]
        refused = max(last, key=lambda waiter: waiter.number)
        self.settle(refused, make_error())
        return refused
