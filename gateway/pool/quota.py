"""How many requests an owner (API key) may have in flight or waiting at the same time. Knows no request.

Gateways with a shared store count together: each request holds a lease there, which expires if its gateway dies.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gateway.shared_store.connection import SharedStore, SharedStoreAway
from gateway.shared_store.scripts import LEASE
from shared.errors import QuotaExceeded


class OwnerQuota:
    """Counts the requests of each owner. Thread-safe."""

    def __init__(self, max_concurrency: int, shared: SharedStore | None = None) -> None:
        """
        Args:
            max_concurrency: limit of an owner that has none of its own; 0: no limit.
            shared: counts for several gateways; while it is away, each gateway counts its own requests.
        """
        self._max_concurrency = max_concurrency
        self._lock = threading.Lock()
        self._num_requests: Counter[str] = Counter()
        self._shared = shared
        self._lease = None if shared is None else shared.script(LEASE)

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
                raise _refusal(limit)
            self._num_requests[owner] += 1
        try:
            with self._leasing(owner, limit):
                yield
        finally:
            with self._lock:
                self._num_requests[owner] -= 1
                if not self._num_requests[owner]:
                    del self._num_requests[owner]

    @contextmanager
    def _leasing(self, owner: str, limit: int) -> Iterator[None]:
        """Hold a lease in the shared store while the block runs, if it can be used."""
        if self._shared is None or self._lease is None:
            yield
            return
        leases, member, is_leased = self._shared.name("leases", owner), secrets.token_hex(8), False
        with suppress(SharedStoreAway), self._shared.using("concurrency") as client:
            arguments = [limit, self._shared.request_ttl_ms, member]
            is_leased = bool(self._lease(keys=[leases], args=arguments, client=client))
            if not is_leased:
                raise _refusal(limit)
        try:
            yield
        finally:
            if is_leased:  # else, or if this fails, it expires
                with suppress(SharedStoreAway), self._shared.using("concurrency") as client:
                    client.zrem(leases, member)


def _refusal(limit: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"{limit} requests of this API key run or wait already, which is its limit "
        "(TERCET_KEY_CONCURRENCY, unless the key has its own). Wait for one of them to end.",
    )
