"""A queue that is fair between owners: deficit round robin over owners, first come, first served within an owner.

M. Shreedhar and G. Varghese, "Efficient fair queueing using deficit round robin", SIGCOMM 1995. Each owner has a queue
and a deficit, the branches that it may still take in this round. In each round every owner's deficit grows by
`QUANTUM`; the first request of its queue is served when the deficit covers its branches, which are then subtracted. So
owners that wait get equal numbers of branches, however many requests each of them sends and however large they are.

No lock: `Admission` holds its own. Knows nothing of slots.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

# Branches that an owner may take in a round. With the smallest quantum an owner is served at most one request ahead of
# its share. A request is found after as many rounds as it has branches, which are few.
QUANTUM = 1


class Waiting(Protocol):
    """A request in the queue: the id of its API key, and the room that it needs."""

    @property
    def owner(self) -> str: ...

    @property
    def num_branches(self) -> int: ...


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """Requests that wait, in the order of deficit round robin."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[W]] = OrderedDict()  # first the owner whose turn it is; none is empty
        self._deficits: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def append(self, request: W) -> None:
        """Add a request behind the others of its owner. An owner without any joins at the end of the round."""
        if request.owner not in self._queues:
            self._queues[request.owner] = deque()
            self._deficits[request.owner] = QUANTUM
        self._queues[request.owner].append(request)

    def head(self, passed: Collection[str] = ()) -> W | None:
        """The request to serve next. It stays the head until it is served or removed, whatever is added.

        Args:
            passed: owners that must wait although it may be their turn. They keep their place and their deficit.
        """
        while (owner := next((owner for owner in self._queues if owner not in passed), None)) is not None:
            queue = self._queues[owner]
            if queue[0].num_branches <= self._deficits[owner]:
                return queue[0]
            self._deficits[owner] += QUANTUM
            self._queues.move_to_end(owner)
        return None

    def serve(self, head: W) -> None:
        """Remove the head and subtract its branches from its owner's deficit."""
        self._deficits[head.owner] -= head.num_branches
        self.remove(head)

    def remove(self, request: W) -> None:
        """Remove a request that is not served. An owner without requests loses what is left of its deficit."""
        queue = self._queues[request.owner]
        queue.remove(request)
        if not queue:
            del self._queues[request.owner], self._deficits[request.owner]

    def newest(self, owner: str) -> W | None:
        """The last request of an owner, if it has any."""
        queue = self._queues.get(owner)
        return queue[-1] if queue else None
