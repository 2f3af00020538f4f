"""Bulkheads of the gateway's HTTP server: classes of requests, each with threads, bytes and a queue of its own.

A class can use up what is its own, and nothing of another's. In a queue, deficit round robin over owners (API keys, or
addresses) decides who is next; where the waiting requests have too many bytes, the newest request of the owner that has
the most is refused. So an owner's burst is at its own expense. Knows connections and no HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from gateway.server.connections import Connection, Phase
from gateway.waiting.room import Waiter, WaitingRoom
from shared.errors import Overloaded


class _Waiting(Waiter, eq=False, kw_only=True):
    """A complete request."""

    connection: Connection


class WorkQueue:
    """The requests of one class. Its server calls it under a lock.

    Attributes:
        max_threads: requests of this class that are answered at a time.
        num_answering: requests that threads answer now.
        waiting: requests that wait for a thread.
    """

    def __init__(self, max_threads: int, max_wait_s: float, max_bytes: int) -> None:
        """
        Args:
            max_wait_s: how long a request may wait for a thread.
            max_bytes: of the requests that wait for a thread, together, and of the responses that wait for slow
                clients, together. One that is larger by itself is permitted.
        """
        self.max_threads = max_threads
        self.num_answering = 0
        self._max_wait_s = max_wait_s
        self._max_bytes = max_bytes
        self._room: WaitingRoom[_Waiting] = WaitingRoom(max_bytes)
        self.waiting: Collection[object] = self._room.waiting
        self._unsent: dict[Connection, str] = {}  # answered, and not sent yet: the connection's owner

    def append(self, connection: Connection, owner: str) -> list[Connection]:
        """Add a request. Returns those that are to be refused, the new one perhaps included."""
        size, deadline = connection.parser.num_bytes, connection.since + self._max_wait_s
        self._room.enter(_Waiting(owner=owner, size=size, deadline=deadline, connection=connection))
        refused = []
        while len(self.waiting) > 1 and (waiting := self._room.refuse_one(_no_room)) is not None:
            refused.append(waiting.connection)
        return refused

    def take(self) -> Connection | None:
        """The next request, if a thread may answer it: `finish` has to be called then."""
        while self.num_answering < self.max_threads and (head := self._room.head(None)) is not None:
            self._room.settle(head)
            if head.connection.phase is Phase.READY:  # else closed or refused meanwhile
                self.num_answering += 1
                return head.connection
        return None

    def finish(self) -> None:
        """A thread has answered."""
        self.num_answering -= 1

    def take_late(self, now: float) -> list[Connection]:
        """Remove the requests that have waited for too long at `now` (`time.monotonic()`), and return them. None has
        while a thread is free: the leader takes it, however late the machine lets it."""
        late = self._room.late(now) if self.num_answering >= self.max_threads else []
        for waiting in late:
            self._room.settle(waiting, _no_room())
        return [waiting.connection for waiting in late if waiting.connection.phase is Phase.READY]  # else closed

    def hold_response(self, connection: Connection, owner: str) -> list[Connection]:
        """A response is complete and waits for a client that reads slowly. Returns the connections to be closed: the
        oldest of the owner for which the most bytes wait, until no more than `max_bytes` do."""
        self._unsent[connection] = owner
        unsent = {held: held.response.num_unsent_bytes for held in self._unsent if held.phase is not Phase.CLOSED}
        self._unsent = {held: self._unsent[held] for held, num_bytes in unsent.items() if num_bytes}
        closed = []
        total = sum(unsent.values())
        while total > self._max_bytes and len(self._unsent) > 1:
            of_owners: Counter[str] = Counter()
            for held, held_owner in self._unsent.items():
                of_owners[held_owner] += unsent[held]
            [(most, _)] = of_owners.most_common(1)
            oldest = next(held for held, held_owner in self._unsent.items() if held_owner == most)
            del self._unsent[oldest]
            total -= unsent[oldest]
            closed.append(oldest)
        return closed


def _no_room() -> Overloaded:
    return Overloaded("Too many requests wait for a thread. Try again shortly.")
