"""How many requests an owner (API key) may have in flight or waiting at the same time.

Knows no request. Each gateway process counts those that it has itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import QuotaExceeded


class OwnerQuota:
    """Counts the requests of each owner. Thread-safe."""

    def __init__(self, max_concurrency: int) -> None:
        """
        Args:
            max_concurrency: limit of an owner that has none of its own; 0: no limit.
        """
        self._max_concurrency = max_concurrency
        self._lock = threading.Lock()
        self._num_requests: Counter[str] = Counter()

    @contextmanager
    def entering(self, owner: str, max_concurrency: int | None = None) -> Iterator[None]:
        """Count a request while the block runs. Requests without an owner ("") are not limited.

        Args:
            max_concurrency: the owner's own limit; None: the default, 0: no limit.

        Raises:
            QuotaExceeded: the owner has that many requests already.
        """
        limit = self._max_concurrency if max_concurrency is None else max_concurrency
        if not owner or not limit:
            yield
            return
        with self._lock:
            if self._num_requests[owner] >= limit:
                raise QuotaExceeded(
                    f"{limit} requests of this API key run or wait already, which is its limit "
                    "(TERCET_KEY_CONCURRENCY, unless the key has its own). Wait for one of them to end.",
                )
            self._num_requests[owner] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_requests[owner] -= 1
                if not self._num_requests[owner]:
                    del self._num_requests[owner]
