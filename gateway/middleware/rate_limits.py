"""The rate limit of each API key: a token bucket per key.

A bucket holds a minute's requests and refills evenly: a key that has been idle may send a minute's requests at once,
and in the long run it gets its rate exactly. It knows neither what a request is nor who sends it. Each gateway process
has its own buckets.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from shared.errors import QuotaExceeded


class TokenBuckets:
    """One bucket per name, full at first, as long as the process lives. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._levels: dict[str, tuple[float, float]] = {}  # tokens, and when there were that many

    def take(self, name: str, num_tokens: float, *, size: float, per_second: float) -> float:
        """Take tokens from a bucket, all or none.

        Args:
            size: tokens in a full bucket.
            per_second: tokens that a bucket gets back.

        Returns:
            Seconds until the bucket has that many tokens. 0: they are taken.
        """
        with self._lock:
            now = self._clock()
            level, since = self._levels.get(name, (size, now))
            level = min(size, level + (now - since) * per_second)
            if level < num_tokens:
                return (num_tokens - level) / per_second
            self._levels[name] = level - num_tokens, now
        return 0.0


class RateLimits:
    """One bucket of requests per key id. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._buckets = TokenBuckets(clock)

    def take(self, key_id: str, per_minute: int) -> None:
        """Count one request of a key.

        Args:
            per_minute: the key's rate; 0 for no limit.

        Raises:
            QuotaExceeded: the bucket is empty; `Retry-After` says when the next request fits.
        """
        if not per_minute:
            return
        if wait_s := self._buckets.take(key_id, 1, size=per_minute, per_second=per_minute / 60):
            wait_s = max(1, math.ceil(round(wait_s, 3)))
            raise QuotaExceeded(
                f"This API key may send {per_minute} requests a minute; the next one fits in {wait_s} s.",
                retry_after_s=wait_s,
            )
