"""Sessions: a newer request of a session cancels the one before it. Knows requests, not what they compute.

Each gateway process knows its own requests: the balancer keeps a session at its gateway.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from gateway.generation.request import RequestContext
from shared.errors import Superseded


class Sessions:
    """The newest request of each session. A session belongs to an owner (API key). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[Hashable, RequestContext] = {}

    @contextmanager
    def superseding(self, context: RequestContext) -> Iterator[None]:
        """Cancel the session's previous request; while the block runs, the next request cancels this one.

        A cancelled request ends with `Superseded`, whether it waits for room or is being decoded.

        Raises:
            Superseded: a request with a higher number has come before this one.
        """
        if context.spec.session is None:
            yield
            return
        session = context.spec.owner, context.spec.session
        with self._lock:
            other = self._newest.get(session)
            is_late = other is not None and 0 < context.spec.sequence < other.spec.sequence
            if not is_late:
                self._newest[session] = context
        if is_late:
            raise _superseded()
        if other is not None:
            other.cancel(_superseded())
        try:
            yield
        finally:
            with self._lock:
                if self._newest.get(session) is context:
                    del self._newest[session]


def _superseded() -> Superseded:
    return Superseded("A newer request of this session came.", headers={"x-should-retry": "false"})
