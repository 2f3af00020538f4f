"""A queue that is fair between owners: deficit round robin over owners.

M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin", SIGCOMM 1995. Each owner has a queue
and a deficit, the cost that it may still spend in this round. In each round every owner's deficit grows by `QUANTUM`;
the first request of its queue is served when the deficit covers its cost, which is then subtracted. So owners that wait
get equal shares, however many requests each of them sends and however large they are.

Within an owner the order is first come, first served. Requests that the owner's next request will soon make useless
(`is_latest_first`) have a queue of their own in the round, whose last request is served first: it has the most time
left. An owner with both shares its turn between them. After Facebook's adaptive LIFO: B. Maurer, "Fail at scale", ACM
Queue 13(8), 2015.

No lock: each room is used under one. Knows neither threads nor slots.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Generic, Protocol, TypeAlias, TypeVar

# Cost that an owner may spend in a round. With the smallest quantum an owner is served at most one request ahead of its
# share. A request is found after as many rounds as its cost, which is small.
QUANTUM = 1
# An owner, and whether its latest request is served first.
Line: TypeAlias = tuple[str, bool]


class Waiting(Protocol):
    """A request in the queue: its owner, what it costs the owner to be served, and its order."""

    @property
    def owner(self) -> str: ...

    @property
    def cost(self) -> int: ...

    @property
    def is_latest_first(self) -> bool: ...


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """Requests that wait, in the order of deficit round robin."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Line, deque[W]] = OrderedDict()  # first the one whose turn it is; none is empty
        self._deficits: dict[Line, float] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def append(self, request: W) -> None:
        """Add a request. An owner without any joins at the end of the round."""
        line = line_of(request)
        if line not in self._lines:
            self._lines[line] = deque()
            self._deficits[line] = QUANTUM
        if request.is_latest_first:
            self._lines[line].appendleft(request)
        else:
            self._lines[line].append(request)

    def head(self, passed: Collection[Line] = ()) -> W | None:
        """The request to serve next. It stays the head until it is served or removed, or a later one of its line comes
        that is served first.

        Args:
            passed: lines that must wait although it may be their turn. They keep their place and their deficit.
        """
        while (line := next((line for line in self._lines if line not in passed), None)) is not None:
            first = self._lines[line][0]
            if first.cost <= self._deficits[line]:
                return first
            other = (line[0], not line[1])
            self._deficits[line] += QUANTUM / (2 if other in self._lines and other not in passed else 1)
            self._lines.move_to_end(line)
        return None

    def serve(self, head: W) -> None:
        """Remove the head and subtract its cost from its line's deficit."""
        self._deficits[line_of(head)] -= head.cost
        self.remove(head)

    def remove(self, request: W) -> None:
        """Remove a request that is not served. A line without requests loses what is left of its deficit."""
        line = line_of(request)
        requests = self._lines[line]
        requests.remove(request)
        if not requests:
            del self._lines[line], self._deficits[line]

    def last(self, owner: str) -> list[W]:
        """The request that would be served last, of each line of an owner."""
        return [self._lines[line][-1] for line in ((owner, False), (owner, True)) if line in self._lines]


def line_of(request: Waiting) -> Line:
    return request.owner, request.is_latest_first
