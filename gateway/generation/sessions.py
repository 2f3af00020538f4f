"""Sessions: a newer request of a session cancels the one before it. Knows requests, not what they compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.generation.request import RequestContext
from shared.errors import Superseded


class Sessions:
    """The newest request of each session. A session belongs to an owner (API key). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], RequestContext] = {}

    @contextmanager
    def superseding(self, context: RequestContext) -> Iterator[None]:
        """Cancel the session's previous request; while the block runs, the next request cancels this one.

        A cancelled request ends with `Superseded`, whether it waits for room or is being decoded.
        """
        if context.spec.session is None:
            yield
            return
        session = context.spec.owner, context.spec.session
        with self._lock:
            older = self._newest.get(session)
            self._newest[session] = context
        if older is not None:
            older.cancel(Superseded("A newer request of this session came.", headers={"x-should-retry": "false"}))
        try:
            yield
        finally:
            with self._lock:
                if self._newest.get(session) is context:
                    del self._newest[session]
