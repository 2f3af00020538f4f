"""When each worker has last reported, for the router and the ingress of one process.

Ray takes 10 s and more to find that a node is gone, and until then its workers look idle. Workers report twice a
second, so this finds it within two.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# No branch is sent to a worker that has been silent for this time, as long as others are not.
SILENCE_S = 2.0
# Longer than Ray takes to find that a worker is gone.
MEMORY_S = 300.0


class Heartbeats:
    """Thread-safe: each operation is one of a dict."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen_at: dict[str, float] = {}

    def beat(self, name: str) -> None:
        """`name` has just reported."""
        now = self._clock()
        self._seen_at[name] = now
        for each, seen_at in list(self._seen_at.items()):
            if now - seen_at > MEMORY_S:
                self._seen_at.pop(each, None)

    def is_silent(self, name: str, limit_s: float = SILENCE_S) -> bool:
        """Whether `name` has reported before, and not for `limit_s`."""
        seen_at = self._seen_at.get(name)
        return seen_at is not None and self._clock() - seen_at > limit_s

    def silent(self) -> frozenset[str]:
        """Those that are silent now."""
        return frozenset(name for name in list(self._seen_at) if self.is_silent(name))


# Serve makes the router itself, in the process of the ingress, and passes it nothing: both find this here.
HEARTBEATS = Heartbeats()
