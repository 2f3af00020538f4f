"""Bulkheads of the gateway's HTTP server: classes of requests, each with threads, bytes and a queue of its own.

A class can use up what is its own, and nothing of another's. In a queue, deficit round robin over owners (API keys)
decides who is next; where the waiting requests have too many bytes, the newest request of the owner that has the most
is refused. So an owner's burst is at its own expense. Knows connections and no HTTP.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gateway.pool.fair_queue import FairQueue
from gateway.server.connections import Connection, Phase


@dataclass(slots=True, eq=False)
class _Waiting:
    connection: Connection
    owner: str
    num_bytes: int
    num_branches: int = 1  # of a `FairQueue`: requests count alike


class WorkQueue:
    """The requests of one class. Only the server's main thread calls it.

    Attributes:
        max_threads: requests of this class that are answered at a time.
        max_wait_s: how long one may wait for a thread.
        num_answering: requests that threads answer now.
    """

    def __init__(self, max_threads: int, max_wait_s: float, max_bytes: int) -> None:
        """
        Args:
            max_bytes: of the requests that wait for a thread, together, and of the responses that wait for slow
                clients, together. One that is larger by itself is permitted.
        """
        self.max_threads = max_threads
        self.max_wait_s = max_wait_s
        self.num_answering = 0
        self._max_bytes = max_bytes
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._waiting: dict[Connection, _Waiting] = {}
        self._num_bytes: Counter[str] = Counter()  # of those that wait, by owner
        self._unsent: dict[Connection, str] = {}  # answered, and not sent yet: the connection's owner

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def append(self, connection: Connection, owner: str) -> list[Connection]:
        """Add a request. Returns those that are to be refused, the new one perhaps included."""
        waiting = _Waiting(connection, owner, connection.num_buffered_bytes)
        self._waiting[connection] = waiting
        self._queue.append(waiting)
        self._num_bytes[owner] += waiting.num_bytes
        refused = []
        while self._num_bytes.total() > self._max_bytes and len(self._waiting) > 1:
            [(most, _)] = self._num_bytes.most_common(1)
            newest = self._queue.newest(most)
            assert newest is not None
            self.remove(newest.connection)
            refused.append(newest.connection)
        return refused

    def take(self) -> Connection | None:
        """The next request, if there is a thread for it."""
        while self.num_answering < self.max_threads and (head := self._queue.head()) is not None:
            self._forget(head)
            self._queue.serve(head)
            if head.connection.phase is Phase.READY:  # else closed or refused meanwhile
                self.num_answering += 1
                return head.connection
        return None

    def remove(self, connection: Connection) -> None:
        """A request waits no more, because it was refused."""
        if (waiting := self._waiting.get(connection)) is not None:
            self._forget(waiting)
            self._queue.remove(waiting)

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

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.connection]
        self._num_bytes[waiting.owner] -= waiting.num_bytes
        if not self._num_bytes[waiting.owner]:
            del self._num_bytes[waiting.owner]
