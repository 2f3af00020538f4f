"""A waiting room: requests wait for something that is given out one after the other, a thread or room in slots.

It is bounded, and fair between owners (API keys, or addresses). A request in it is settled once: it is served, or it
ends with an error because it was cancelled, is late, or would be served last of the owner that has the most in a room
that is full. Knows neither HTTP nor models, and nothing of what is waited for.

No lock: the caller uses a room from one thread, or holds a lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeAlias, TypeVar

import msgspec

from shared.errors import TercetError

# Cost that an owner may spend in a round. With the smallest quantum an owner is served at most one request ahead of its
# share. A request is found after as many rounds as its cost, which is small.
QUANTUM = 1
# How long later requests of sessions may overtake one, in seconds. A client that has sent no other for so long waits
# for it.
LATEST_FIRST_S = 1.0
# An owner, and the kind of its requests.
Line: TypeAlias = tuple[str, int]
FIRST_COME, LATEST_FIRST, OVERDUE = range(3)


class Waiter(msgspec.Struct, eq=False, kw_only=True):
    """A request that waits.

    Attributes:
        owner: requests of one owner count together.
        queue: requests of one queue wait for the same; none waits for those of another.
        cost: part of its owner's turn that it takes to be served.
        size: what it counts in the bound of the room.
        deadline: `time.monotonic()` time.
        kind: of its owner's `LATEST_FIRST`, the latest is served first; after `LATEST_FIRST_S` one becomes `OVERDUE`.
        is_urgent: it is not in a queue, but before all of them, and does not count in the bound.
        since: `time.monotonic()` time.
        error: why it was not served.
    """

    owner: str
    queue: Hashable = None
    cost: int = 1
    size: int = 1
    deadline: float
    kind: int = FIRST_COME
    is_urgent: bool = False
    since: float = msgspec.field(default_factory=time.monotonic)
    number: int = 0
    is_waiting: bool = False
    error: TercetError | None = None

    @property
    def line(self) -> Line:
        return self.owner, self.kind

    def wake(self) -> None:
        """Called when it has been settled."""


W = TypeVar("W", bound=Waiter)


class FairQueue(Generic[W]):
    """A queue that is fair between owners: deficit round robin over owners.

    M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin", SIGCOMM 1995. Each owner has a
    queue and a deficit, the cost that it may still spend in this round. In each round every owner's deficit grows by
    `QUANTUM`; the first request of its queue is served when the deficit covers its cost, which is then subtracted. So
    owners that wait get equal shares, however many requests each of them sends and however large they are.

    Within an owner the order is first come, first served. Requests that the owner's next request will soon make useless
    (`LATEST_FIRST`) have a line of their own, whose last request is served first: it has the most time left. What has
    waited there for long has a third line, so that none is overtaken without end. The lines of an owner take turns.
    After Facebook's adaptive LIFO: B. Maurer, "Fail at scale", ACM Queue 13(8), 2015.
    """

    def __init__(self) -> None:
        # First the owner whose turn it is, and its line whose turn it is. None is empty.
        self._lines: OrderedDict[str, OrderedDict[Line, deque[W]]] = OrderedDict()
        self._deficits: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def append(self, request: W) -> None:
        """Add a request. An owner without any joins at the end of the round."""
        if (lines := self._lines.get(request.owner)) is None:
            lines = self._lines[request.owner] = OrderedDict()
            self._deficits[request.owner] = QUANTUM
        line = lines.setdefault(request.line, deque())
        (line.appendleft if request.kind == LATEST_FIRST else line.append)(request)

    def head(self, passed: Collection[Line] = ()) -> W | None:
        """The request to serve next. It stays the head until it is served or removed, or a later one of its line comes
        that is served first.

        Args:
            passed: lines that must wait although it may be their turn. They keep their place.
        """
        self._move_overdue()
        while self._lines:
            turns = (each[0] for lines in self._lines.values() for line, each in lines.items() if line not in passed)
            if (first := next(turns, None)) is None or first.cost <= self._deficits[first.owner]:
                return first
            self._deficits[first.owner] += QUANTUM
            self._lines.move_to_end(first.owner)
        return None

    def _move_overdue(self) -> None:
        until = time.monotonic() - LATEST_FIRST_S
        for owner, lines in self._lines.items():
            latest = lines.get((owner, LATEST_FIRST), ())
            while latest and latest[-1].since <= until:
                latest[-1].kind = OVERDUE
                lines.setdefault((owner, OVERDUE), deque()).append(latest.pop())
                if not latest:
                    del lines[owner, LATEST_FIRST]

    def serve(self, head: W) -> None:
        """Remove the head and subtract its cost from its owner's deficit."""
        self._deficits[head.owner] -= head.cost
        self._lines[head.owner].move_to_end(head.line)
        self.remove(head)

    def remove(self, request: W) -> None:
        """Remove a request that is not served. An owner without requests loses what is left of its deficit."""
        lines, line = self._lines[request.owner], request.line
        lines[line].remove(request)
        if not lines[line]:
            del lines[line]
        if not lines:
            del self._lines[request.owner], self._deficits[request.owner]

    def last(self, owner: str) -> list[W]:
        """The request that would be served last, of each line of an owner."""
        return [line[-1] for line in self._lines.get(owner, {}).values()]


class WaitingRoom(Generic[W]):
    """Requests in several queues with one bound.

    Attributes:
        waiting: those in the queues, in the order of arrival.
        urgent: those before all queues, also in the order of arrival.
        sizes: of those in the queues, by owner; none is 0.
    """

    def __init__(self, bound: int) -> None:
        """
        Args:
            bound: sizes of all that wait in the queues, together.
        """
        self.bound = bound
        self._queues: defaultdict[Hashable, FairQueue[W]] = defaultdict(FairQueue)
        self.waiting: dict[W, None] = {}
        self.urgent: dict[W, None] = {}
        self.sizes: defaultdict[str, int] = defaultdict(int)
        self._num_entered = 0

    @property
    def size(self) -> int:
        """What waits in the queues, together."""
        return sum(self.sizes.values())

    def is_empty(self, queue: Hashable) -> bool:
        return not self._queues[queue]

    def late(self, now: float) -> list[W]:
        """The requests in the queues whose deadline has passed."""
        return [waiter for waiter in self.waiting if now > waiter.deadline]

    def enter(self, waiter: W) -> None:
        """Add a request."""
        self._num_entered += 1
        waiter.number, waiter.is_waiting = self._num_entered, True
        if waiter.is_urgent:
            self.urgent[waiter] = None
        else:
            self.waiting[waiter] = None
            self._queues[waiter.queue].append(waiter)
            self.sizes[waiter.owner] += waiter.size

    def head(self, queue: Hashable, passed: Collection[Line] = ()) -> W | None:
        """The request of a queue to serve next, as `FairQueue.head`."""
        return self._queues[queue].head(passed)

    def settle(self, waiter: W, error: TercetError | None = None) -> None:
        """End the waiting of a request, which does wait: it is served now, or ends with an error."""
        if waiter.is_urgent:
            del self.urgent[waiter]
        else:
            del self.waiting[waiter]
            queue = self._queues[waiter.queue]
            (queue.serve if error is None else queue.remove)(waiter)
            self.sizes[waiter.owner] -= waiter.size
            if not self.sizes[waiter.owner]:
                del self.sizes[waiter.owner]
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
        most = max(self.sizes.values())
        owners = [owner for owner, size in self.sizes.items() if size == most]
        last = [waiter for queue in self._queues.values() for owner in owners for waiter in queue.last(owner)]
        refused = max(last, key=lambda waiter: waiter.number)
        self.settle(refused, make_error())
        return refused
