"""Turns of sessions: when requests run at once, when they wait, whose turn comes next, and how the limit is learned."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.generation.request import RequestContext
from gateway.generation.sessions import Sessions
from gateway.generation.turns import SessionTurns
from shared.errors import ClientGone, DeadlineExceeded, Overloaded, Superseded, TercetError
from tests.e2e.harness import until
from tests.gateway.generation.stubs import make_spec
from tests.gateway.pool.reservations import make

# More than enough turns without an answer for a limit of one, and with an answer for one of two.
NUM_UNANSWERED, NUM_ANSWERED = 10, 30


class Run:
    """A request of a session in a thread of its own, until `finish` or until it is cancelled."""

    def __init__(
        self,
        turns: SessionTurns,
        sessions: Sessions,
        session: str | None,
        owner: str = "",
        num_completions: int = 3,
        timeout_s: float = 10.0,
    ) -> None:
        spec = make_spec(timeout_s, session=session, owner=owner, num_completions=num_completions)
        self.context = RequestContext(spec)
        self.is_running = threading.Event()
        self.is_over = threading.Event()
        self.error: TercetError | None = None
        self._turns, self._sessions = turns, sessions

    def __call__(self) -> None:
        try:
            with self._sessions.superseding(self.context), self._turns.taken(self.context):
                self.is_running.set()
                with self.context.on_cancel(self.is_over.set):
                    assert self.is_over.wait(10)
                if self.context.cancel_reason is not None:
                    raise self.context.cancel_reason
                self.context.cancel()  # as a request that has its result does
        except TercetError as error:
            self.error = error

    def finish(self) -> None:
        assert self.is_running.wait(10)
        self.is_over.set()


Start = Callable[..., Run]


@pytest.fixture
def turns() -> SessionTurns:
    return SessionTurns(make([("small", 1)]), queue_bound=12)


@pytest.fixture
def start(turns: SessionTurns) -> Iterator[Start]:
    """Starts a request and returns once it runs, waits, or has been refused."""
    sessions = Sessions()
    started: list[Run] = []

    with ThreadPoolExecutor(64) as pool:

        def start(session: str | None, **fields: object) -> Run:
            run = Run(turns, sessions, session, **fields)  # type: ignore[arg-type]
            started.append(run)
            future = pool.submit(run)
            request = (run.context.spec.owner, session)
            until(
                lambda: run.is_running.is_set() or future.done() or _waits(turns, request, run.context),
                10,
                "a request that runs, waits or has ended",
            )
            return run

        yield start
        for run in reversed(started):
            run.context.cancel(ClientGone("The test is over."))


def _waits(turns: SessionTurns, session: object, context: RequestContext) -> bool:
    places = [model.places.get(session) for model in turns._models.values()]
    return any(place is not None and place.request is not None and place.request.context is context for place in places)


def learn_a_limit_of_one(start: Start) -> None:
    """Sessions whose every turn ends without an answer."""
    for number in range(NUM_UNANSWERED):
        for _ in range(3):  # the third comes after the turn
            run = start(f"restless {number}")
            until(lambda run=run: run.is_running.is_set(), 10, "a turn")  # type: ignore[misc]
        run.context.cancel(ClientGone("It gave up."))


def test_without_superseded_requests_all_run_at_once(start: Start) -> None:
    assert all(start(f"session {number}").is_running.is_set() for number in range(20))


def test_past_the_limit_sessions_take_turns_and_their_newest_request_runs(start: Start, turns: SessionTurns) -> None:
    learn_a_limit_of_one(start)
    running = start("a")
    first = [start(name) for name in ("b", "c", "d")]
    newest = [start(name) for name in ("d", "c", "b")]
    assert not any(run.is_running.is_set() for run in (*first, *newest))
    until(lambda: all(isinstance(run.error, Superseded) for run in first), 10, "the superseded requests' ends")
    assert turns.num_waiting == 9
    running.finish()
    d, c, b = newest
    for run, others in ((b, (c, d)), (c, (d,)), (d, ())):
        until(lambda run=run: run.is_running.is_set(), 10, "its turn")  # type: ignore[misc]
        assert not any(other.is_running.is_set() for other in others)
        run.finish()


def test_a_request_without_a_session_waits_for_no_turn(start: Start) -> None:
    learn_a_limit_of_one(start)
    start("a")
    assert not start("b").is_running.is_set()
    assert start(None).is_running.is_set()


def test_a_turn_that_a_key_interrupts_goes_on_with_its_request_once(start: Start) -> None:
    learn_a_limit_of_one(start)
    a, b = start("a"), start("b")
    second = start("a")
    assert isinstance(a.context.cancel_reason, Superseded)
    assert second.is_running.is_set()
    third = start("a")
    until(b.is_running.is_set, 10, "the next session's turn")
    assert not third.is_running.is_set()


def test_a_client_that_hangs_up_before_it_asks_again_keeps_its_place(start: Start) -> None:
    learn_a_limit_of_one(start)
    running, b, c = start("a"), start("b"), start("c")
    b.context.cancel(ClientGone("The client hung up."))
    until(lambda: b.error is not None, 10, "the end of the older request")
    newer = start("b")
    running.finish()
    until(newer.is_running.is_set, 10, "its turn")
    assert not c.is_running.is_set()


def test_the_turn_of_a_session_that_is_gone_passes_to_the_next(start: Start) -> None:
    learn_a_limit_of_one(start)
    running, b, c = start("a"), start("b"), start("c")
    b.context.cancel(ClientGone("The client hung up."))
    running.finish()
    until(c.is_running.is_set, 10, "its turn")


def test_answers_raise_the_limit(start: Start) -> None:
    learn_a_limit_of_one(start)
    for number in range(NUM_ANSWERED):
        running, waiting = start(f"{number} a"), start(f"{number} b")
        running.finish()
        waiting.finish()
    assert start("a").is_running.is_set()
    assert start("b").is_running.is_set()


def test_a_request_that_no_engine_could_have_answered_in_time_leaves_the_limit(start: Start) -> None:
    slow = start("slow")
    threading.Event().wait(0.5)
    slow.finish()  # the shortest time that is known
    until(lambda: not slow.error, 1, "its end")
    learn_a_limit_of_one(start)
    assert all(start(f"session {number}").is_running.is_set() for number in range(20))


def test_too_many_sessions_are_refused_at_the_expense_of_the_key_that_has_most(start: Start) -> None:
    learn_a_limit_of_one(start)
    start("running", owner="a")
    waiting = [start(f"session {number}", owner="a") for number in range(4)]  # 12 branches
    other = start("session", owner="b")
    until(lambda: waiting[-1].error is not None, 10, "a refusal")
    assert isinstance(waiting[-1].error, Overloaded)
    assert not other.error
    assert not any(run.error for run in waiting[:-1])


def test_a_turn_that_comes_after_the_deadline_is_an_error(start: Start) -> None:
    learn_a_limit_of_one(start)
    start("a")
    late = start("b", timeout_s=0.2)
    until(lambda: late.error is not None, 10, "its deadline")
    assert isinstance(late.error, DeadlineExceeded)


def test_requests_that_clients_await_are_counted_without_jobs(turns: SessionTurns, start: Start) -> None:
    with turns.taken(RequestContext(make_spec(10.0, session=None)), is_job=True):
        assert turns.num_awaited == 0
        runs = [start(None), start("a")]
        assert turns.num_awaited == 2
        for run in runs:
            run.finish()
        until(lambda: turns.num_awaited == 0, 5, "both have ended")
