"""The rate at which large requests are read: a burst of them arrives over seconds, not in one moment.

Reading costs CPU time: two copies and the page faults of new memory. The second copy alone takes 0.9 ms per MB
(measured by hand, AMD EPYC, Zen 4). The thread that does it also reads the small requests of others, and the cores are
the workers' too. What is read faster than it may begin afterwards (`LARGE_S_PER_BYTE`) would only wait in memory. Knows
connections and no HTTP.
"""

from __future__ import annotations

import math
from collections import deque

from gateway.server.connections import READ_BYTES, Connection, Phase
from gateway.server.work_queue import LARGE_S_PER_BYTE

READ_S = READ_BYTES * LARGE_S_PER_BYTE
# After a pause a MB is read at once, so that a lone document waits for nothing; and a poll, which rounds up to a
# millisecond, may end late.
CREDIT_S = (1 << 20) * LARGE_S_PER_BYTE


class LargeReads:
    """Connections on which more of a large request has arrived. Only the server's main thread calls it."""

    def __init__(self) -> None:
        self._arrived: deque[Connection] = deque()
        self._next_at = 0.0

    def append(self, connection: Connection) -> None:
        """More has arrived. The connection is not to be polled until `take` has returned it."""
        self._arrived.append(connection)

    def take(self, now: float) -> list[Connection]:
        """The connections to be read once now; those that have closed meanwhile are dropped.

        Args:
            now: `time.monotonic()` time.
        """
        taken = []
        while self._arrived and now >= self._next_at:
            connection = self._arrived.popleft()
            if connection.phase is not Phase.CLOSED:
                taken.append(connection)
                self._next_at = max(self._next_at, now - CREDIT_S) + READ_S
        return taken

    @property
    def resumes_at(self) -> float:
        """When `take` may have a connection; infinite if none waits."""
        return self._next_at if self._arrived else math.inf
