"""Bulkheads of the gateway's HTTP server: classes of requests, each with threads, bytes and a queue of its own.

A class can use up what is its own, and nothing of another's. In a queue, deficit round robin over owners (API keys)
decides who is next; where the waiting requests have too many bytes, the newest request of the owner that has the most
is refused. So an owner's burst is at its own expense. One thread at a time has the interpreter, so what takes it for
long begins at a bounded rate: large requests, and those of classes that yield to others. Knows connections and no HTTP.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from gateway.server.connections import LARGE_BYTES, Connection, Phase
from gateway.waiting.room import Waiter, WaitingRoom
from shared.cpu_share import SHARE, pause_after
from shared.errors import Overloaded

# What a large request costs the gateway at most, in seconds of CPU time per byte: 9.3 to 10.3 ms for a context of 1 MB,
# 4.8 for feedback, 3.1 for an unknown path (measured by hand, AMD EPYC, Zen 4). Texts to tokenize cost more, and have a
# pace of their own in `gateway.pool.tokenizing`.
CPU_S_PER_BYTE = 10e-9
# After a large request the next of its class waits for this time, so that a class spends at most a quarter of a core on
# them.
LARGE_S_PER_BYTE = CPU_S_PER_BYTE / SHARE
# The longest pause of a class that yields to another, which takes `shared.cpu_share.SHARE` of a core if none is longer.
# Beside 150 `GET /metrics` a second, the p99 of completions of another key was 224 to 269 ms without pauses, and 174 to
# 201 ms with them (four times each, measured by hand, AMD EPYC, Zen 4, two cores). There is a longest one so that a
# request which took long, or a flood before it had to yield, makes none wait for long.
MAX_PAUSE_S = 0.1
SMALL, LARGE = "small", "large"


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting(Waiter):
    """A complete request; large ones have a queue of their own."""

    connection: Connection

    @property
    def is_large(self) -> bool:
        return self.queue == LARGE


class WorkQueue:
    """The requests of one class. Only the server's main thread calls it.

    Attributes:
        max_threads: requests of this class that are answered at a time.
        num_answering: requests that threads answer now.
    """

    def __init__(
        self,
        max_threads: int,
        max_wait_s: float,
        max_bytes: int,
        max_large: int | None = None,
        yields_to: WorkQueue | None = None,
    ) -> None:
        """
        Args:
            max_wait_s: how long a request may wait for a thread, not counting the wait of large ones for others.
            max_bytes: of the requests that wait for a thread, together, and of the responses that wait for slow
                clients, together. One that is larger by itself is permitted.
            max_large: threads that large requests may have together; None: all.
            yields_to: the class for which this one pauses while any of its requests is answered.
        """
        self.max_threads = max_threads
        self.num_answering = 0
        self._max_wait_s = max_wait_s
        self._max_bytes = max_bytes
        self._max_large = max_threads if max_large is None else max_large
        self._room: WaitingRoom[_Waiting] = WaitingRoom(max_bytes)
        self._yields_to = yields_to
        self._pause_until = 0.0  # while the other class has requests
        self._large_at = 0.0  # when the next large request may begin
        self._answering_large: set[Connection] = set()
        self._unsent: dict[Connection, str] = {}  # answered, and not sent yet: the connection's owner

    @property
    def has_waiting(self) -> bool:
        return bool(self._room)

    def append(self, connection: Connection, owner: str) -> list[Connection]:
        """Add a request. Returns those that are to be refused, the new one perhaps included."""
        size = connection.num_buffered_bytes
        max_wait_s = self._max_wait_s + (self._max_bytes * LARGE_S_PER_BYTE if size > LARGE_BYTES else 0.0)
        self._room.enter(
            _Waiting(
                owner=owner,
                queue=LARGE if size > LARGE_BYTES else SMALL,
                size=size,
                deadline=connection.since + max_wait_s,
                connection=connection,
            )
        )
        refused = []
        while len(self._room) > 1 and (waiting := self._room.refuse_one(_no_room)) is not None:
            refused.append(waiting.connection)
        return refused

    def take(self, now: float) -> Connection | None:
        """The next request, if there is a thread for it and it may begin.

        Args:
            now: `time.monotonic()` time, as in all methods.
        """
        while self.num_answering < self.max_threads and now >= self._begins_at:
            # A large one whose time has come goes first: they come at a bounded rate, so they delay no small one much.
            if (head := self._room.head(LARGE if now >= self._large_free_at else SMALL)) is None:
                break
            self._room.settle(head)
            if head.connection.phase is Phase.READY:  # else closed or refused meanwhile
                self.num_answering += 1
                if head.is_large:
                    self._answering_large.add(head.connection)
                    self._large_at = now + head.size * LARGE_S_PER_BYTE
                return head.connection
        return None

    @property
    def resumes_at(self) -> float:
        """When `take` has a request that now waits only for its time; infinite if none does."""
        if self.num_answering >= self.max_threads or not self._room:
            return math.inf
        return max(self._begins_at, self._large_free_at if self._room.is_empty(SMALL) else 0.0)

    @property
    def _begins_at(self) -> float:
        """When any request may begin."""
        return self._pause_until if self._yields_to is not None and self._yields_to.num_answering else 0.0

    @property
    def _large_free_at(self) -> float:
        """When a large request that waits may have a free thread; infinite if none may."""
        return (
            self._large_at
            if not self._room.is_empty(LARGE) and len(self._answering_large) < self._max_large
            else math.inf
        )

    def finish(self, connection: Connection, now: float, busy_s: float) -> None:
        """A thread has answered.

        Args:
            busy_s: CPU time that it took.
        """
        self.num_answering -= 1
        self._pause_until = min(now + MAX_PAUSE_S, max(now, self._pause_until) + pause_after(busy_s))
        self._answering_large.discard(connection)

    def take_late(self, now: float) -> list[Connection]:
        """Remove the requests that have waited for too long, and return them."""
        late = self._room.late(now)
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
