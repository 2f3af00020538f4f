"""Token buckets: what a key or an address may send.

A bucket refills evenly: an owner that has been idle may send a full bucket at once, and in the long run it gets its
rate exactly. It knows neither what a token stands for nor who sends it. Each gateway process has its own buckets.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from shared.errors import QuotaExceeded

# Buckets that are kept before those that have refilled are dropped.
MIN_KEPT = 1024
# Of a token: sums of times are not exact.
_ROUNDING = 1e-6


class TokenBuckets:
    """One bucket per name, full at first; of a full one nothing is kept. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            clock: monotonic seconds.
        """
        self._clock = clock
        self._lock = threading.Lock()
        self._full_at: dict[str, float] = {}
        self._max_kept = MIN_KEPT

    def __len__(self) -> int:
        """Buckets that are kept."""
        return len(self._full_at)

    def take(self, name: str, num_tokens: float, *, size: float, per_second: float, detail: str) -> None:
        """Take tokens from a bucket, all or none. From a full one, more may be taken than it holds.

        Args:
            size: tokens in a full bucket.
            per_second: tokens that a bucket gets back.
            detail: of the error, before the time to wait.

        Raises:
            QuotaExceeded: the bucket has fewer; `Retry-After` says when it has them.
        """
        with self._lock:
            now = self._clock()
            if len(self._full_at) > self._max_kept:
                self._full_at = {name: full_at for name, full_at in self._full_at.items() if full_at > now}
                self._max_kept = max(MIN_KEPT, 2 * len(self._full_at))
            full_at = max(now, self._full_at.get(name, now))
            num_lacking = (full_at - now) * per_second + min(num_tokens, size) - size
            if num_lacking <= _ROUNDING:
                self._full_at[name] = full_at + num_tokens / per_second
                return
        wait_s = max(1, math.ceil(round(num_lacking / per_second, 3)))
        raise QuotaExceeded(f"{detail} in {wait_s} s.", retry_after_s=wait_s)
