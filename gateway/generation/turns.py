"""Turns of sessions: past the capacity, fewer requests run at a time, so that they end before the next key.

An engine that decodes all sessions' requests together slows each of them down. Where sessions ask at every key, past
the capacity each request then takes longer than the time between two keys: it is superseded before its answer comes,
and hardly anyone gets one, although the engine is busy. So the requests of sessions that run at a time are limited,
and the others wait here:

- A session has one place in the queue, which its newest request takes over from the older ones. When its turn comes,
  it asks for the text as it is then. Sessions take turns; API keys share as in every queue (`FairQueue`).
- If the next key comes during a turn, its request runs at once in place of the older, and has all the time until the
  key after it. This happens once in a turn; so no session keeps the others waiting.
- The limit follows what happens: additive increase while requests are answered, multiplicative decrease while too many
  are superseded as they run (V. Jacobson, "Congestion avoidance and control", SIGCOMM 1988). There is none until the
  first decrease.
- A request that was superseded before even an idle engine would have answered it says nothing about the limit. The
  time of an idle engine is taken to be the shortest that was seen (L. Brakmo and L. Peterson, "TCP Vegas", IEEE JSAC
  1995).

Requests without a session do not wait here. Knows requests, not what they compute.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from gateway.generation.request import RequestContext
from gateway.pool.admission import Admission
from gateway.pool.fair_queue import FairQueue
from shared.errors import ClientGone, DeadlineExceeded, Overloaded, Superseded, TercetError

# Of the requests that run, as many may be superseded before the limit falls. What they have cost is lost, but a limit
# that is too low leaves the engine idle, and uneven writers supersede some in any case.
MAX_UNANSWERED = 0.2
# Weight of the newest request in that share: some twenty count.
WEIGHT = 1 / 16
# After a decrease the next comes when requests that began after it have ended.
DECREASE = 0.8
# How long the next request of a session may take to come after a client has hung up on the one before.
MAX_GAP_S = 0.25
# The shortest time is forgotten: it doubles in 350 answers without a shorter one.
FORGETTING = 1.002
TOO_LATE = "The turn of this session did not come before the deadline; allow a longer max_time, or run more workers."
TOO_MANY = "Too many sessions wait for their turn (TERCET_QUEUE bounds their branches). Try again shortly."


@dataclass(slots=True, eq=False)
class _Place:
    """A session's place in the queue. `request` is None once its request was cancelled and no newer one has come."""

    owner: str
    session: Hashable
    num_branches: int
    request: _Request | None = None


@dataclass(slots=True, eq=False)
class _Request:
    context: RequestContext
    session: Hashable
    place: _Place | None = None
    entered_at: float | None = None
    has_left: bool = False
    is_second: bool = False  # of its turn
    error: TercetError | None = None
    settled: threading.Event = field(default_factory=threading.Event)


class _ModelTurns:
    """The sessions of one model, and the limit that was learned. `SessionTurns` holds its lock."""

    def __init__(self) -> None:
        self.queue = FairQueue[_Place]()
        self.places: dict[Hashable, _Place] = {}
        self.num_running = 0
        self.limit = float("inf")
        self._share = 0.0  # of the last requests that ran, those that were superseded
        self._shortest_s = float("inf")  # time of an answer
        self._decreased_at = 0.0
        self._interrupted: OrderedDict[Hashable, float] = OrderedDict()  # by time

    def advance(self) -> None:
        """Let requests run, up to the limit; one always may. Places whose session is gone are removed."""
        while (place := self.queue.head()) is not None:
            if place.request is not None and self.num_running and self.num_running + 1 > self.limit:
                return
            del self.places[place.session]
            if place.request is None:
                self.queue.remove(place)
                continue
            self.queue.serve(place)
            request, place.request = place.request, None
            request.place = None
            self.run(request)

    def run(self, request: _Request) -> None:
        request.entered_at = time.monotonic()
        self.num_running += 1
        request.settled.set()

    def end(self, request: _Request, *, is_answered: bool = False, is_interrupted: bool = False) -> None:
        """A request runs no longer: adapt the limit to how it has ended."""
        if request.has_left:
            return
        assert request.entered_at is not None
        request.has_left = True
        now = time.monotonic()
        took_s = now - request.entered_at
        if is_answered:
            self._shortest_s = min(FORGETTING * self._shortest_s, took_s)
            self._share -= WEIGHT * self._share
            if self._share <= MAX_UNANSWERED and self.queue:
                self.limit += 1 / self.limit
        if is_interrupted and not request.is_second:
            self._interrupted[request.session] = now
        if is_interrupted and (took_s >= self._shortest_s or self._shortest_s == float("inf")):
            self._share += WEIGHT * (1 - self._share)
            if self._share > MAX_UNANSWERED and request.entered_at > self._decreased_at:
                self.limit = max(1.0, DECREASE * min(self.limit, self.num_running))
                self._decreased_at = now
        self.num_running -= 1

    def resumes(self, session: Hashable) -> bool:
        """Whether the session's turn was interrupted just now, which its next request continues."""
        now = time.monotonic()
        while self._interrupted and now - next(iter(self._interrupted.values())) > MAX_GAP_S:
            self._interrupted.popitem(last=False)
        return self._interrupted.pop(session, None) is not None


class SessionTurns:
    """When the requests of sessions run. Thread-safe."""

    def __init__(self, admission: Admission, queue_bound: int) -> None:
        """
        Args:
            queue_bound: branches that may wait, here and in the queues of the admission together.
        """
        self._admission = admission
        self._queue_bound = queue_bound
        self._lock = threading.Lock()
        self._models: dict[str, _ModelTurns] = {}
        self._num_awaited = 0

    @property
    def num_waiting(self) -> int:
        """Branches of the requests that wait, here and for room in slots."""
        with self._lock:
            places = [place for turns in self._models.values() for place in turns.places.values()]
        num_here = sum(place.num_branches for place in places if place.request is not None)
        return num_here + self._admission.num_waiting

    @property
    def num_awaited(self) -> int:
        """Requests that run, or wait for their turn, and whose clients wait: all but jobs."""
        with self._lock:
            return self._num_awaited

    @contextmanager
    def taken(self, context: RequestContext, *, is_job: bool = False) -> Iterator[None]:
        """Wait for the turn of the request's session; the block is the request's run.

        Raises:
            Overloaded: too many wait, and its API key has the most of them.
            DeadlineExceeded: its turn did not come in time.
            TercetError: the reason for which it was cancelled while it waited.
        """
        amount = 0 if is_job else 1
        with self._lock:
            self._num_awaited += amount
        try:
            with self._turn(context):
                yield
        finally:
            with self._lock:
                self._num_awaited -= amount

    @contextmanager
    def _turn(self, context: RequestContext) -> Iterator[None]:
        if context.spec.session is None:
            yield
            return
        request = _Request(context, (context.spec.owner, context.spec.session))
        with self._lock:
            turns = self._models.setdefault(context.spec.model, _ModelTurns())
            self._join(turns, request)
            turns.advance()
            self._refuse_beyond_the_bound()
        with context.on_cancel(partial(self._leave, request, ClientGone("Cancelled while waiting for its turn."))):
            request.settled.wait(max(0.0, context.spec.deadline - time.monotonic()))
        self._leave(request, DeadlineExceeded(TOO_LATE))
        if request.error is not None:
            raise context.cancel_reason or request.error
        is_answered = False
        try:
            with context.on_cancel(partial(self._interrupt, turns, request)):
                yield
            is_answered = context.cancel_reason is None
        finally:
            with self._lock:
                turns.end(request, is_answered=is_answered)
                turns.advance()

    def _interrupt(self, turns: _ModelTurns, request: _Request) -> None:
        """At once, because the session's next request is about to come. Requests are cancelled as they end, too."""
        if isinstance(request.context.cancel_reason, Superseded | ClientGone):
            with self._lock:
                turns.end(request, is_interrupted=True)

    def _join(self, turns: _ModelTurns, request: _Request) -> None:
        spec, session = request.context.spec, request.session
        if turns.resumes(session):
            request.is_second = True
            turns.run(request)
            return
        place = turns.places.get(session)
        if place is None:
            place = turns.places[session] = _Place(spec.owner, session, spec.num_branches)
            turns.queue.append(place)
        if place.request is not None:  # cancelled already, by the same event that brought this one
            self._settle(place.request, Superseded("A newer request of this session came."))
        place.request, request.place = request, place

    def _leave(self, request: _Request, error: TercetError) -> None:
        """A request that waits does so no more; its session keeps its place for the next."""
        with self._lock:
            if request.place is not None:
                self._settle(request, error)

    def _settle(self, request: _Request, error: TercetError) -> None:
        assert request.place is not None
        request.place.request, request.place, request.error = None, None, error
        request.settled.set()

    def _refuse_beyond_the_bound(self) -> None:
        """Longest queue drop, as in `Admission`: of the owner that has most, a place without a request, else the
        newest."""
        max_waiting = self._queue_bound - self._admission.num_waiting
        while True:
            of_owners: dict[str, list[tuple[_ModelTurns, _Place]]] = {}
            for turns in self._models.values():
                for place in turns.places.values():
                    of_owners.setdefault(place.owner, []).append((turns, place))
            sizes = {owner: sum(place.num_branches for _, place in places) for owner, places in of_owners.items()}
            if sum(sizes.values()) <= max_waiting:
                return
            newest_first = reversed(of_owners[max(sizes, key=sizes.__getitem__)])
            turns, place = min(newest_first, key=lambda found: found[1].request is not None)
            if place.request is not None:
                self._settle(place.request, Overloaded(TOO_MANY))
            turns.queue.remove(place)
            del turns.places[place.session]
