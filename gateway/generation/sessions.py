"""Sessions: a newer request of a session cancels the one before it. Knows requests, not what they compute.

Several gateways agree on a session's newest request through their shared store: each request takes the session's next
number, and the gateway of the request before it, if it is another, gets a message.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.generation.request import RequestContext
from gateway.shared_store.connection import SharedStore, SharedStoreAway
from gateway.shared_store.scripts import TAKE_SESSION_NUMBER
from shared.errors import Superseded

_CHANNEL = "superseded"


@dataclass(slots=True, eq=False)
class _Newest:
    """The newest request of a session in this gateway.

    Attributes:
        number: among the session's requests in all gateways; None until it is known.
        superseded_by: the highest number of another gateway's request.
    """

    context: RequestContext
    number: int | None = None
    superseded_by: int = 0


class Sessions:
    """The newest request of each session. A session belongs to an owner (API key). Thread-safe."""

    def __init__(self, shared: SharedStore | None = None) -> None:
        """
        Args:
            shared: store of several gateways, not started yet. None if this is the only gateway.
        """
        self._lock = threading.Lock()
        self._newest: dict[Hashable, _Newest] = {}
        self._shared = shared
        if shared is not None:
            self._take_number = shared.script(TAKE_SESSION_NUMBER)
            shared.receive(_CHANNEL, self._receive)

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
        names = context.spec.owner, context.spec.session
        session = names if self._shared is None else self._shared.name("session", *names)
        newest = _Newest(context)
        with self._lock:
            other = self._newest.get(session)
            is_late = other is not None and context.spec.sequence < other.context.spec.sequence
            if not is_late:
                self._newest[session] = newest
        if is_late:
            raise _superseded()
        if other is not None:
            _cancel(other.context)
        try:
            if isinstance(session, str):
                self._announce(session, newest)
            yield
        finally:
            with self._lock:
                if self._newest.get(session) is newest:
                    del self._newest[session]

    def _announce(self, session: str, newest: _Newest) -> None:
        """Cancel the session's previous request at another gateway."""
        assert self._shared is not None
        if newest.context.is_over:  # of a number after that of the request that has cancelled it
            return
        number = 0  # without the store, a message that comes later is of a later request
        try:
            with self._shared.using("session") as client:
                channels = self._shared.channel(_CHANNEL, "")
                arguments = [self._shared.gateway_id, self._shared.request_ttl_ms, channels]
                number = int(self._take_number(keys=[session], args=arguments, client=client))
        except SharedStoreAway:
            pass
        with self._lock:
            newest.number = number
            is_superseded = newest.superseded_by > number
        if is_superseded:
            _cancel(newest.context)

    def _receive(self, message: str) -> None:
        """Another gateway has a request of a session that this gateway had."""
        session, _, number = message.rpartition(" ")
        with self._lock:
            newest = self._newest.get(session)
            if newest is None or not number.isdecimal():
                return
            newest.superseded_by = max(newest.superseded_by, int(number))
            is_superseded = newest.number is not None and newest.number < newest.superseded_by
        if is_superseded:
            _cancel(newest.context)


def _cancel(context: RequestContext) -> None:
    context.cancel(_superseded())


def _superseded() -> Superseded:
    return Superseded("A newer request of this session came.", headers={"x-should-retry": "false"})
