"""Which worker a branch goes to: the one that remembers its document, if it has room.

Implements Ray Serve's request-router interface. The key is `X-Session-Id`, which the gateway sends as a hash and which
Serve passes on as the request's session.
"""

from __future__ import annotations

import random
import time
from typing import Any

from ray.serve.request_router import RequestRouter

from deploy.cloud.ray.pool_state import POOL, preferred


class DocumentRouter(RequestRouter):  # type: ignore[misc]  # of a package without checked types
    """Ranks the worker that remembers the document first, then the less loaded of two random ones.

    Workers that have fallen silent are left out while there are others."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Ranks of workers for one attempt to place a request; Serve skips those that have no room.

        Args:
            candidate_replicas: `ray.serve.request_router.RunningReplica`s.
            pending_request: a `ray.serve.request_router.PendingRequest`.
        """
        if not candidate_replicas:
            return []
        now = time.monotonic()
        found = [replica for replica in candidate_replicas if not POOL.is_silent(replica.replica_id.unique_id, now)]
        candidate_replicas = found or candidate_replicas
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        pending_request.routing_context.should_backoff = True  # between attempts, while all are full
        key = pending_request.metadata.session_id
        if not key:
            return [two]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[preferred(key, by_name)]], two]
