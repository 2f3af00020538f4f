"""Admission: bounded, in order within a model, never behind another model's requests, cancellable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.pool.admission import Admission
from shared.errors import ClientGone, DeadlineExceeded, NotReady, Overloaded
from shared.plan import Plan, make_slots
from shared.protocol import State

WARM = State(state="warm", ms_per_token=1.0)


def make(models: list[tuple[str, int]], *, max_batch: int = 3, queue: int = 6, warm: bool = True) -> Admission:
    plan = Plan({}, [], make_slots(["cpu"], models, Path("/run"), max_batch))
    admission = Admission(plan, "auto", queue)
    for slot in plan.slots if warm else ():
        admission.update(slot.index, WARM)
    return admission


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


class Waiting:
    """A reservation in a thread of its own; the constructor returns when it is in the queue. `cancel` cancels it."""

    def __init__(self, pool: ThreadPoolExecutor, admission: Admission, *args: Any, **kwargs: Any) -> None:
        self.cancel: Callable[[], None]
        is_queued = threading.Event()

        @contextmanager
        def cancelling(cancel: Callable[[], None]) -> Iterator[None]:
            self.cancel = cancel
            is_queued.set()
            yield

        self.future: Future[list[int]] = pool.submit(admission.reserve, *args, cancelling=cancelling, **kwargs)
        assert is_queued.wait(5)


def test_never_more_in_flight_than_the_batch() -> None:
    admission = make([("small", 2)])
    assert admission.reserve("small", 3, soon()) == [0, 0, 0]
    assert admission.reserve("small", 3, soon()) == [1, 1, 1]
    with pytest.raises(DeadlineExceeded):
        admission.reserve("small", 1, soon(0.02))
    admission.release(0)
    assert admission.reserve("small", 1, soon()) == [0]
    assert admission.in_flight() == [3, 3]


def test_never_more_in_flight_than_the_batch_with_many_threads() -> None:
    admission = make([("small", 2)], queue=96)
    highest = [0, 0]
    lock = threading.Lock()

    def request(num_branches: int) -> None:
        slots = admission.reserve("small", num_branches, soon(20))
        with lock:
            for index, in_flight in enumerate(admission.in_flight()):
                highest[index] = max(highest[index], in_flight)
        for slot in slots:
            admission.release(slot)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(request, [1, 2, 3, 1, 3, 2] * 40))
    assert max(highest) <= 3
    assert admission.in_flight() == [0, 0]
    assert admission.num_waiting == 0


def test_a_request_reserves_its_branches_together() -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 2, soon())
    with pytest.raises(DeadlineExceeded, match="No slot of small"):
        admission.reserve("small", 2, soon(0.02))
    assert admission.in_flight() == [2]


def test_a_request_larger_than_all_slots_reserves_one_wave() -> None:
    assert make([("small", 2)]).reserve("small", 8, soon()) == [0, 1, 0, 1, 0, 1]


def test_a_full_queue_refuses_with_retry_after() -> None:
    admission = make([("small", 1)], queue=3)
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        waiting = Waiting(pool, admission, "small", 3, soon())
        with pytest.raises(Overloaded, match="3 branches are waiting; the limit is 3") as caught:
            admission.reserve("small", 1, soon())
        assert caught.value.headers["Retry-After"] == "1"
        assert admission.num_waiting == 3
        for _ in range(3):
            admission.release(0)
        assert waiting.future.result() == [0, 0, 0]
    assert admission.num_waiting == 0


def test_first_come_first_served_within_a_model() -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        first, second, third = [Waiting(pool, admission, "small", num_branches, soon()) for num_branches in (3, 1, 1)]
        admission.release(0)  # room for one branch, but the first in the queue needs three
        assert admission.num_waiting == 5
        for _ in range(2):
            admission.release(0)
        assert first.future.result(5) == [0, 0, 0]
        assert admission.num_waiting == 2
        admission.release(0)
        assert second.future.result(5) == [0]
        assert not third.future.done()
        admission.release(0)
        assert third.future.result(5) == [0]


def test_requests_do_not_wait_for_another_models_slots() -> None:
    admission = make([("small", 1), ("medium", 1)])
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        waiting = Waiting(pool, admission, "small", 3, soon(0.3))
        assert admission.reserve("medium", 3, soon()) == [1, 1, 1]
        with pytest.raises(DeadlineExceeded):
            waiting.future.result()


def test_a_reservation_past_its_deadline_makes_way_for_smaller_ones() -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 2, soon())
    with ThreadPoolExecutor() as pool:
        large = Waiting(pool, admission, "small", 3, soon(0.1))
        small = Waiting(pool, admission, "small", 1, soon())
        with pytest.raises(DeadlineExceeded):
            large.future.result()
        assert small.future.result() == [0]


def test_waits_for_a_slot_that_is_not_warm_yet() -> None:
    admission = make([("small", 1)], warm=False)
    with ThreadPoolExecutor() as pool:
        waiting = Waiting(pool, admission, "small", 3, soon())
        admission.update(0, State(state="loading"))
        assert admission.num_waiting == 3
        admission.update(0, WARM)
        assert waiting.future.result() == [0, 0, 0]


@pytest.mark.parametrize("state", ["starting", "loading", "draining", "failed", "down"])
def test_only_warm_slots_get_branches(state: Any) -> None:
    admission = make([("small", 2)])
    admission.update(0, State(state=state))
    assert admission.reserve("small", 3, soon()) == [1, 1, 1]


def test_a_model_that_failed_in_all_its_slots_is_refused_at_once_with_the_reason() -> None:
    admission = make([("small", 2), ("medium", 1)], warm=False)
    for index in range(2):
        admission.update(index, State(state="failed", reason="no such file"))
    with pytest.raises(NotReady, match="no such file"):
        admission.reserve("small", 3, soon())


def test_a_model_that_fails_while_a_request_waits_refuses_it() -> None:
    admission = make([("small", 2)], warm=False)
    admission.update(0, State(state="failed", reason="no such file"))
    with ThreadPoolExecutor() as pool:
        waiting = Waiting(pool, admission, "small", 3, soon())
        assert admission.num_waiting == 3  # the other slot may still load it
        admission.update(1, State(state="failed"))
        with pytest.raises(NotReady) as caught:
            waiting.future.result(5)
    assert caught.value.retry_after_s is not None


def test_a_document_returns_to_its_slot() -> None:
    admission = make([("small", 2)])
    assert admission.reserve("small", 3, soon()) == [0, 0, 0]
    assert admission.reserve("small", 3, soon(), document=77) == [1, 1, 1]
    for slot in (0, 0, 0, 1, 1, 1):
        admission.release(slot)
    assert admission.reserve("small", 3, soon(), document=77) == [1, 1, 1]
    assert admission.reserve("small", 3, soon(), document=78) == [0, 0, 0]


def test_a_retry_goes_before_the_queue_and_past_its_bound() -> None:
    admission = make([("small", 1)], queue=1)
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        first = Waiting(pool, admission, "small", 1, soon())
        retry = Waiting(pool, admission, "small", 1, soon(), avoid={0}, is_retry=True)
        assert admission.num_waiting == 1
        admission.release(0)
        assert retry.future.result() == [0]
        assert not first.future.done()
        admission.release(0)
        assert first.future.result() == [0]


def test_cancelling_ends_the_waiting_and_frees_the_queue() -> None:
    admission = make([("small", 1)], queue=3)
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        waiting = Waiting(pool, admission, "small", 3, soon(30))
        waiting.cancel()
        with pytest.raises(ClientGone):
            waiting.future.result(5)
    assert admission.num_waiting == 0
    assert admission.in_flight() == [3]


def test_cancelling_lets_the_next_in_the_queue_through() -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 2, soon())
    with ThreadPoolExecutor() as pool:
        large = Waiting(pool, admission, "small", 3, soon())
        small = Waiting(pool, admission, "small", 1, soon())
        large.cancel()
        assert small.future.result(5) == [0]


def test_cancelling_after_the_reservation_leaves_it_as_it_is() -> None:
    admission = make([("small", 1)])
    with ThreadPoolExecutor() as pool:
        reservation = Waiting(pool, admission, "small", 3, soon())
        assert reservation.future.result(5) == [0, 0, 0]
        reservation.cancel()
    assert admission.in_flight() == [3]
