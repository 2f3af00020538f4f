"""Starts requests of every dialect: refusal without room, quota, session, hang-up, fan-out.

Knows the models that are served. Knows no dialect and no HTTP server; of a client it knows only its socket.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from gateway.generation.fanout import Fanout
from gateway.generation.request import Caller, GenerationSpec, RequestContext
from gateway.generation.selection import SelectionPolicy
from gateway.generation.suggestions import StartedRequest
from gateway.pool.slot_table import ServedModels
from shared.cancellation import Cancelling, HangupWatcher
from shared.errors import ClientGone, FieldError, NotReady, QuotaExceeded, Superseded, UnknownModel, invalid_field
from shared.plan import Model
from shared.time_margins import MARGINS


class OwnerQuota:
    """How many requests an owner (API key) may have in flight or waiting at the same time. Thread-safe. Each gateway
    process counts those that it has itself."""

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
        """Count a request while the block runs.

        Args:
            max_concurrency: the owner's own limit; None: the default, 0: no limit.

        Raises:
            QuotaExceeded: the owner has that many requests already.
        """
        limit = self._max_concurrency if max_concurrency is None else max_concurrency
        if not limit:
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


class Sessions:
    """The newest request of each session, which cancels the one before it. A session belongs to an owner (API key).
    Thread-safe. Each gateway process knows its own requests: the balancer keeps a session at its gateway."""

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


class RequestStarter:
    """Thread-safe; one instance serves all dialects."""

    def __init__(
        self, models: ServedModels, fanout: Fanout, hangups: HangupWatcher, max_concurrency: int, timeout_s: float
    ) -> None:
        """
        Args:
            max_concurrency: as of `OwnerQuota`.
            timeout_s: the longest time that a request may take.
        """
        self.models = models
        self.default_model = models.default
        self.timeout_s = timeout_s
        self._fanout = fanout
        self._quota = OwnerQuota(max_concurrency)
        self._hangups = hangups
        self._sessions = Sessions()

    def counting(self, caller: Caller) -> AbstractContextManager[None]:
        """Count a request among its owner's while the block runs.

        Raises:
            QuotaExceeded: before the block.
        """
        return self._quota.entering(caller.owner, caller.max_concurrency)

    def watching(self, caller: Caller) -> Cancelling:
        """Makes a context manager from a function that is called if the client hangs up."""
        return partial(self._hangups.watching, caller.sock)

    @contextmanager
    def started(self, spec: GenerationSpec, policy: SelectionPolicy) -> Iterator[StartedRequest]:
        """Start a request, which ends with the block.

        Raises:
            Overloaded, NotReady, DeadlineExceeded, Superseded, ClientGone: it was not started, or cancelled.
        """
        context, caller = RequestContext(spec), spec.caller
        with (
            self._sessions.superseding(context),
            self._hangups.watching(caller.sock, context.hang_up),
            caller.cancelling(context.cancel),
        ):
            try:
                self._start(context)
                yield StartedRequest(context, self._fanout, policy)
            finally:
                context.cancel()

    def _start(self, context: RequestContext) -> None:
        try:
            self._fanout.start(context)
        except ClientGone as error:  # the reservation's only word for a cancelled request
            raise context.cancel_reason or error from None

    def model(self, name: str | None, field: str) -> Model:
        """The model of this name; None: the default.

        Args:
            field: the dialect's name for it, for the error.

        Raises:
            UnknownModel: no model of this name is served.
            NotReady: it is on other machines, and no worker has reported yet what a request for it may contain.
        """
        model = self.served_model(name, field)
        if not model.n_ctx and not (model := self.models.wait_for(model.name)).n_ctx:
            raise NotReady(
                f"No worker of {model.name} has been reached yet. Repeat the request in a moment; GET /health/ready "
                "shows why.",
            )
        return model

    def served_model(self, name: str | None, field: str) -> Model:
        """As `model`, also if its `n_ctx` is not known yet (0).

        Raises:
            UnknownModel: no model of this name is served.
        """
        name = name or self.default_model
        if name not in self.models.names:
            served = ", ".join(self.models.names)
            raise UnknownModel(
                f"{field} {name!r} is not served here; served: {served}.",
                fields=(FieldError(field, f"must be one of: {served}"),),
            )
        return self.models.get(name)

    def deadline(self, started_at: float, max_time_s: float | None = None) -> float:
        """When a request must be answered, of `time.monotonic()`.

        Raises:
            InvalidRequest: `max_time_s` exceeds the server's limit, or no worker could answer in it.
        """
        if max_time_s is not None and max_time_s > self.timeout_s:
            raise invalid_field("max_time", f"must be at most {self.timeout_s:g} seconds (TERCET_TIMEOUT_S)")
        if max_time_s is not None and max_time_s <= MARGINS.return_s:
            raise invalid_field("max_time", f"must be above {MARGINS.return_s:g} seconds")
        return started_at + (max_time_s or self.timeout_s)
