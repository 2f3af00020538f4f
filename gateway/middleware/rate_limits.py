"""The rate limit of each API key: a token bucket per key.

A bucket holds a minute's requests and refills evenly: a key that has been idle may send a minute's requests at once,
and in the long run it gets its rate exactly. It knows neither what a request is nor who sends it.

Gateways with a shared store share a key's bucket and use the store's clock, so their own clocks need not agree.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pyrate_limiter import Duration, Rate, RedisStateStore, TokenBucket
from pyrate_limiter.abstracts.algorithm import Decision

from gateway.shared_store.connection import SharedStore, SharedStoreAway
from shared.errors import QuotaExceeded

_BUCKET = TokenBucket()
# No request waits longer for its turn than a minute, at one a minute; the library adds a little to it.
MAX_WAIT_MS = 70_000


class RateLimits:
    """One bucket per key id, as long as the process lives. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, shared: SharedStore | None = None) -> None:
        """
        Args:
            clock: monotonic seconds.
            shared: holds the buckets of several gateways; while it is away, each gateway has its own.
        """
        self._clock = clock
        self._shared = shared
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
        decision = self._take_own(key_id, per_minute)
        if self._shared is not None:
            # The gateway's own bucket is kept too, for the time without the store.
            decision = self._take_shared(self._shared, key_id, per_minute) or decision
        if not decision.allowed:
            wait_s = math.ceil((decision.retry_after_ms or 0) / 1e3)
            raise QuotaExceeded(
                f"This API key may send {per_minute} requests a minute; the next one fits in {wait_s} s.",
                retry_after_s=max(1, wait_s),
            )

    def _take_own(self, key_id: str, per_minute: int) -> Decision:
        rates, now_ms = _rates(per_minute), int(self._clock() * 1e3)
        with self._lock:
            state = self._states.get(key_id) or _BUCKET.initial(rates)
            self._states[key_id], decision = _BUCKET.step(rates, state, now_ms, weight=1)
        return decision

    def _take_shared(self, shared: SharedStore, key_id: str, per_minute: int) -> Decision | None:
        """None: the store is away."""
        try:
            with shared.using("rate") as client:
                store: Any = RedisStateStore(client, shared.name("rate", key_id))
                decision = _check(store, client, per_minute)
                if not decision.allowed and (decision.retry_after_ms or 0) > MAX_WAIT_MS:
                    # The clock has gone back: that of Redis' machine, or of another machine after a failover.
                    store.reset()
                    decision = _check(store, client, per_minute)
        except SharedStoreAway:
            return None
        return decision


def _check(store: Any, client: Any, per_minute: int) -> Decision:
    seconds, microseconds = client.time()
    now_ms = 1000 * int(seconds) + int(microseconds) // 1000
    decision = store.check(_BUCKET, _rates(per_minute), now_ms, weight=1)
    assert isinstance(decision, Decision)
    return decision


@lru_cache(maxsize=1024)
def _rates(per_minute: int) -> list[Rate]:
    return [Rate(per_minute, Duration.MINUTE)]
