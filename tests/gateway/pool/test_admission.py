"""Admission: bounded, fair between owners, never behind another model's requests, cancellable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from gateway.pool.admission import Admission
from shared.errors import ClientGone, DeadlineExceeded, NotReady, Overloaded
from shared.protocol import State
from tests.gateway.pool.reservations import WARM, Waiting, claim, make

other, burst = partial(claim, owner="other"), partial(claim, owner="burst")


def full(**options: Any) -> Admission:
    """One slot of `small`, whose batch an owner has reserved."""
    admission = make([("small", 1)], **options)
    admission.reserve(burst(), 3)
    return admission


Wait = Callable[..., Waiting]


@pytest.fixture
def wait() -> Iterator[Wait]:
    """Reserves in a thread; what still waits at the end is cancelled."""
    made: list[Waiting] = []

    def reserve(*args: Any, **options: Any) -> Waiting:
        made.append(Waiting(pool, *args, **options))
        return made[-1]

    with ThreadPoolExecutor(40) as pool:
        yield reserve
        for waiting in made:
            waiting.cancel()


def test_never_more_in_flight_than_the_batch_with_many_threads() -> None:
    admission = make([("small", 2)], queue=96)
    room = [threading.Semaphore(3) for _ in range(2)]

    def request(num_branches: int) -> None:
        own = claim(timeout_s=20)
        slots = admission.reserve(own, num_branches)
        assert all(room[slot].acquire(blocking=False) for slot in slots)
        for slot in slots:
            room[slot].release()
            admission.release(slot, own)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(request, [1, 2, 3, 1, 3, 2] * 40))
    assert (admission.in_flight(), admission.num_waiting) == ([0, 0], 0)


def test_a_request_reserves_its_branches_together() -> None:
    admission = make([("small", 1)])
    admission.reserve(claim(), 2)
    with pytest.raises(DeadlineExceeded, match="No slot of small"):
        admission.reserve(claim(timeout_s=0.02), 2)
    assert admission.in_flight() == [2]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_reservation_that_ends_makes_way_for_smaller_ones(wait: Wait, is_cancelled: bool) -> None:
    admission = make([("small", 1)])
    admission.reserve(claim(), 2)
    large = wait(admission, claim(timeout_s=30 if is_cancelled else 0.1), 3)
    small = wait(admission, claim(), 1)
    assert admission.num_waiting == 4  # there is room for the second, but not before the first
    if is_cancelled:
        large.cancel()
    with pytest.raises(ClientGone if is_cancelled else DeadlineExceeded):
        large.future.result(5)
    assert small.future.result(5) == [0]
    assert (admission.in_flight(), admission.num_waiting) == ([3], 0)


def test_waits_for_a_slot_that_is_not_warm_yet(wait: Wait) -> None:
    admission = make([("small", 1)], warm=False)
    waiting = wait(admission, claim(), 3)
    admission.update(0, State(state="loading"))
    assert admission.num_waiting == 3
    admission.update(0, WARM)
    assert waiting.future.result() == [0, 0, 0]


def test_a_model_that_fails_while_a_request_waits_refuses_it(wait: Wait) -> None:
    admission = make([("small", 2)], warm=False)
    admission.update(0, State(state="failed", reason="no such file"))
    waiting = wait(admission, claim(), 3)
    assert admission.num_waiting == 3  # the other slot may still load it
    admission.update(1, State(state="failed"))
    with pytest.raises(NotReady) as caught:
        waiting.future.result(5)
    assert caught.value.headers["Retry-After"]


def test_an_owner_beyond_its_share_leaves_room_while_others_use_the_model(wait: Wait) -> None:
    admission = make([("small", 2)], device="cuda:0", max_batch=12, queue=96)
    admission.release(admission.reserve(other(), 1)[0], other())
    waiting = [wait(admission, burst(), 3) for _ in range(10)]
    assert sum(admission.in_flight()) == 21
    [slot] = set(admission.reserve(other(), 3))  # at once
    assert sum(admission.in_flight()) == 24
    for _ in range(3):
        admission.release(slot, other())
    assert sum(admission.in_flight()) == 21
    for _ in range(9):
        for slot in waiting.pop(0).future.result(5):
            admission.release(slot, burst())
    assert sum(admission.in_flight()) == 3
    assert waiting[0].future.result(5)


def test_an_owner_beyond_its_share_leaves_a_cpu_to_others(wait: Wait) -> None:
    admission = make([("small", 2)], max_batch=48, queue=96)
    admission.release(admission.reserve(other(), 1)[0], other())
    waiting = [wait(admission, burst(), 3) for _ in range(10)]
    assert sum(admission.in_flight()) == 9  # of two blocks of six rows, without an eighth
    for _ in range(2):
        admission.reserve(other(), 3)  # at once
    assert sum(admission.in_flight()) == 15
    for request in waiting:
        request.cancel()


def test_an_owner_beyond_its_share_is_refused_where_no_slot_is_left(wait: Wait) -> None:
    admission = make([("small", 1)], max_batch=24, queue=96)
    admission.release(admission.reserve(other(), 1)[0], other())
    admission.reserve(burst(), 21)
    waiting = wait(admission, burst(), 3)
    admission.update(0, State(state="failed", reason="no such file"))
    with pytest.raises(NotReady):
        waiting.future.result(3)


def test_a_document_returns_to_its_slot() -> None:
    admission = make([("small", 2)])
    assert admission.reserve(claim(), 3) == [0, 0, 0]
    assert admission.reserve(claim(document=77), 3) == [1, 1, 1]
    for slot in (0, 0, 0, 1, 1, 1):
        admission.release(slot, claim())
    assert admission.reserve(claim(document=77), 3) == [1, 1, 1]
    assert admission.reserve(claim(document=78), 3) == [0, 0, 0]


def test_what_waits_goes_to_the_slot_that_has_room_first(wait: Wait) -> None:
    admission = make([("small", 2)], queue=9)
    for slot in (0, 1):
        assert admission.reserve(burst(), 3, avoid={1 - slot}) == [slot] * 3
    requests = [wait(admission, burst(), 3) for _ in range(3)]
    for request in requests:  # slot 0 is slow
        for _ in range(3):
            admission.release(1, burst())
        assert request.future.result(5) == [1, 1, 1]


def test_a_retry_goes_before_the_queue_and_past_its_bound(wait: Wait) -> None:
    admission = full(queue=1)
    first = wait(admission, claim(), 1)
    retries = [wait(admission, claim(), 1, avoid={0}, is_retry=True) for _ in range(2)]
    assert admission.num_waiting == 1
    for request in (*retries, first):  # the retries in the order of their arrival
        assert not request.future.done()
        admission.release(0, burst())
        assert request.future.result(5) == [0]


def test_cancelling_after_the_reservation_leaves_it_as_it_is(wait: Wait) -> None:
    admission, own = make([("small", 1)]), claim()
    [slot] = admission.reserve(own, 1)
    reservation = wait(admission, claim(), 3)
    admission.release(slot, own)
    assert reservation.future.result(5) == [0, 0, 0]
    reservation.cancel()
    assert admission.in_flight() == [3]


def test_a_retry_that_waits_for_another_slot_holds_up_no_request(wait: Wait) -> None:
    admission, own = make([("small", 2)]), claim()
    for slot in (1, 1, 1):
        admission.reserve(own, 1, avoid={1 - slot})
    retry = wait(admission, claim(), 1, avoid={0}, is_retry=True)
    assert admission.reserve(claim(timeout_s=0.5), 3) == [0, 0, 0]
    assert not retry.future.done()
    admission.release(1, own)
    assert retry.future.result(5) == [1]


def test_the_early_check_refuses_what_would_be_refused_and_nothing_else(wait: Wait) -> None:
    admission = make([("small", 1), ("medium", 1)], queue=3)
    admission.check("burst")
    admission.reserve(burst(), 3)
    waiting = wait(admission, burst(), 3)
    admission.check("burst")  # medium has room
    admission.reserve(claim("medium"), 3)
    with pytest.raises(Overloaded):
        admission.check("burst")
    admission.check("other")
    waiting.cancel()
    admission.check("burst")


def test_a_model_whose_slots_stay_down_is_refused_at_once() -> None:
    admission = make([("small", 2), ("medium", 1)], max_down_s=0.0)
    admission.update(0, State(state="down"))
    admission.update(1, State(state="failed"))
    begin = time.monotonic()
    with pytest.raises(NotReady, match=r"ready \(1 down, 1 failed\)") as caught:
        admission.reserve(claim(timeout_s=30), 3)
    assert time.monotonic() - begin < 5
    assert "Retry-After" in caught.value.headers
    admission.check("")  # medium is warm
    admission.update(2, State(state="down"))
    with pytest.raises(NotReady):
        admission.check("")


@pytest.mark.parametrize("state", ["starting", "loading", "down"])
def test_a_deadline_without_a_warm_slot_is_not_blamed(state: Any) -> None:
    admission = make([("small", 1)])
    admission.update(0, State(state=state))
    with pytest.raises(NotReady):
        admission.reserve(claim(timeout_s=0.02), 3)


def revisions(admission: Admission, *revisions: str) -> None:
    """Set the revision of the slots' weights, in slot order."""
    for index, revision in enumerate(revisions):
        admission.update(index, State(state="warm", ms_per_token=1.0, revision=revision))


def test_all_branches_of_a_request_get_the_same_weights() -> None:
    admission, own = make([("small", 3)], max_batch=2), claim(timeout_s=0.3)
    revisions(admission, "a", "b", "b")
    assert sorted(admission.reserve(own, 4)) == [1, 1, 2, 2]
    assert own.revision == "b"
    with pytest.raises(DeadlineExceeded):  # slot 0 has room, but other weights
        admission.reserve(own, 1, is_retry=True)
    admission.release(2, own)
    assert admission.reserve(own, 1, is_retry=True) == [2]


def test_a_request_with_output_is_refused_when_its_weights_are_gone() -> None:
    admission, own = make([("small", 2)], max_down_s=0.0), claim()
    revisions(admission, "a", "b")
    slots = admission.reserve(own, 2)
    own.has_output = True
    revisions(admission, "b", "b")
    with pytest.raises(NotReady, match="the version of small"):
        admission.reserve(own, 1, is_retry=True)
    for slot in slots:
        admission.release(slot, own)
    with pytest.raises(NotReady):
        admission.reserve(own, 1, is_retry=True)


def test_a_request_without_output_starts_again_with_other_weights_when_all_its_branches_have_failed(wait: Wait) -> None:
    admission, own = make([("small", 2)], max_down_s=0.0), claim()
    revisions(admission, "a", "b")
    slots = admission.reserve(own, 2)
    revisions(admission, "b", "b")
    admission.release(slots[0], own)
    first = wait(admission, own, 1, is_retry=True)
    assert not first.future.done()  # the other branch may still give output with the old weights
    admission.release(slots[1], own)
    assert first.future.result(5) == [0]
    assert own.revision == "b"


def test_weights_of_a_slot_that_restarts_are_waited_for(wait: Wait) -> None:
    admission, own = make([("small", 2)]), claim()
    revisions(admission, "a", "b")
    slots = admission.reserve(own, 3)
    own.has_output = True
    admission.update(0, State(state="down"))
    for slot in slots:
        admission.release(slot, own)
    retry = wait(admission, own, 1, avoid={0}, is_retry=True)
    revisions(admission, "a")
    assert retry.future.result(5) == [0]
