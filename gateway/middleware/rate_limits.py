"""The rate limit of each API key: a token bucket per key.

A bucket holds a minute's requests and refills evenly: a key that has been idle may send a minute's requests at once,
and in the long run it gets its rate exactly. What a request is, and who sends it, is not known here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import lru_cache

from pyrate_limiter import Duration, Rate, TokenBucket

from shared.errors import QuotaExceeded, retry_after_s

_BUCKET = TokenBucket()


class RateLimits:
    """One bucket per key id, as long as the process lives. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[str, tuple[float, ...]] = {}  # by key id; what they mean is the library's business

    def take(self, key_id: str, per_minute: int) -> None:
        """Count one request of a key.

        Args:
            per_minute: the key's rate; 0 for no limit.

        Raises:
            QuotaExceeded: the bucket is empty; `Retry-After` says when the next request fits.
        """
        if not per_minute:
            return
        rates, now_ms = _rates(per_minute), int(self._clock() * 1e3)
        with self._lock:
            state = self._states.get(key_id) or _BUCKET.initial(rates)
            self._states[key_id], decision = _BUCKET.step(rates, state, now_ms, weight=1)
        if not decision.allowed:
            wait_s = math.ceil((decision.retry_after_ms or 0) / 1e3)
            raise QuotaExceeded(
                f"This API key may send {per_minute} requests a minute; the next one fits in {wait_s} s.",
                retry_after_s=retry_after_s(minimum=max(1, wait_s)),
            )


@lru_cache(maxsize=1024)
def _rates(per_minute: int) -> list[Rate]:
    return [Rate(per_minute, Duration.MINUTE)]
