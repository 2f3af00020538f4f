"""Admission: bounded, fair between owners, never behind another model's requests, cancellable."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.pool import placement
from gateway.pool.admission import Admission
from gateway.pool.placement import RevisionPin
from shared.errors import ClientGone, DeadlineExceeded, NotReady, Overloaded
from shared.protocol import State
from tests.gateway.pool.reservations import WARM, Waiting, make, soon


def full(owner: str = "", **options: Any) -> Admission:
    """One slot of `small`, whose batch an owner has reserved."""
    admission = make([("small", 1)], **options)
    admission.reserve("small", 3, soon(), owner=owner)
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
        slots = admission.reserve("small", num_branches, soon(20))
        assert all(room[slot].acquire(blocking=False) for slot in slots)
        for slot in slots:
            room[slot].release()
            admission.release(slot)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(request, [1, 2, 3, 1, 3, 2] * 40))
    assert admission.in_flight() == [0, 0]
    assert admission.num_waiting == 0


def test_a_request_reserves_its_branches_together() -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 2, soon())
    with pytest.raises(DeadlineExceeded, match="No slot of small"):
        admission.reserve("small", 2, soon(0.02))
    assert admission.in_flight() == [2]


def test_a_full_queue_refuses_with_retry_after(wait: Wait) -> None:
    admission = full(queue=3)
    waiting = wait(admission, "small", 3, soon())
    with pytest.raises(Overloaded, match="at most 3 branches may wait") as caught:
        admission.reserve("small", 1, soon())
    assert 1 <= int(caught.value.headers["Retry-After"]) <= 3
    assert admission.num_waiting == 3
    for _ in range(3):
        admission.release(0)
    assert waiting.future.result() == [0, 0, 0]
    assert admission.num_waiting == 0


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_reservation_that_ends_makes_way_for_smaller_ones(wait: Wait, is_cancelled: bool) -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 2, soon())
    large = wait(admission, "small", 3, soon(30 if is_cancelled else 0.1))
    small = wait(admission, "small", 1, soon())
    assert admission.num_waiting == 4  # there is room for the second, but not before the first
    if is_cancelled:
        large.cancel()
    with pytest.raises(ClientGone if is_cancelled else DeadlineExceeded):
        large.future.result(5)
    assert small.future.result(5) == [0]
    assert (admission.in_flight(), admission.num_waiting) == ([3], 0)


def test_waits_for_a_slot_that_is_not_warm_yet(wait: Wait) -> None:
    admission = make([("small", 1)], warm=False)
    waiting = wait(admission, "small", 3, soon())
    admission.update(0, State(state="loading"))
    assert admission.num_waiting == 3
    admission.update(0, WARM)
    assert waiting.future.result() == [0, 0, 0]


def test_a_model_that_fails_while_a_request_waits_refuses_it(wait: Wait) -> None:
    admission = make([("small", 2)], warm=False)
    admission.update(0, State(state="failed", reason="no such file"))
    waiting = wait(admission, "small", 3, soon())
    assert admission.num_waiting == 3  # the other slot may still load it
    admission.update(1, State(state="failed"))
    with pytest.raises(NotReady) as caught:
        waiting.future.result(5)
    assert caught.value.headers["Retry-After"]


def test_an_owner_beyond_its_share_leaves_room_while_others_use_the_model(wait: Wait) -> None:
    admission = make([("small", 2)], device="cuda:0", max_batch=12, queue=96)
    admission.release(admission.reserve("small", 1, soon(), owner="other")[0], owner="other")
    burst = [wait(admission, "small", 3, soon(), owner="burst") for _ in range(10)]
    assert sum(admission.in_flight()) == 21
    [slot] = set(admission.reserve("small", 3, soon(), owner="other"))  # at once
    assert sum(admission.in_flight()) == 24
    for _ in range(3):
        admission.release(slot, owner="other")
    assert sum(admission.in_flight()) == 21
    for _ in range(9):
        for slot in burst.pop(0).future.result(5):
            admission.release(slot, owner="burst")
    assert sum(admission.in_flight()) == 3
    assert burst[0].future.result(5)


def test_an_owner_beyond_its_share_leaves_a_cpu_to_others(wait: Wait) -> None:
    admission = make([("small", 2)], max_batch=48, queue=96)
    admission.release(admission.reserve("small", 1, soon(), owner="other")[0], owner="other")
    for _ in range(10):
        wait(admission, "small", 3, soon(), owner="burst")
    assert sum(admission.in_flight()) == 9  # of two blocks of six rows, without an eighth
    for _ in range(2):
        admission.reserve("small", 3, soon(), owner="other")  # at once
    assert sum(admission.in_flight()) == 15


def test_owners_that_all_want_more_than_their_share_fill_the_room_together(wait: Wait) -> None:
    admission = make([("small", 2)], max_batch=12, queue=96)
    for _ in range(6):
        wait(admission, "small", 3, soon(), owner="one")
    for _ in range(6):
        wait(admission, "small", 3, soon(), owner="two")
    assert admission.in_flight() == [12, 12]


def test_an_owner_beyond_its_share_is_refused_where_no_slot_is_left(wait: Wait) -> None:
    admission = make([("small", 1)], max_batch=24, queue=96)
    admission.release(admission.reserve("small", 1, soon(), owner="other")[0], owner="other")
    admission.reserve("small", 21, soon(), owner="burst")
    waiting = wait(admission, "small", 3, soon(), owner="burst")
    admission.update(0, State(state="failed", reason="no such file"))
    with pytest.raises(NotReady):
        waiting.future.result(3)


def test_an_owner_that_is_alone_gets_all_the_room(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    admission = make([("small", 2)], max_batch=12, queue=96)
    admission.release(admission.reserve("small", 1, soon(), owner="other")[0], owner="other")
    monkeypatch.setattr(placement, "RECENT_S", 0.0)
    for _ in range(8):
        wait(admission, "small", 3, soon(), owner="burst")
    assert sum(admission.in_flight()) == 24


def test_an_owner_within_its_share_waits_for_room_alone() -> None:
    admission = make([("small", 1)], max_batch=24, queue=96)
    for _ in range(3):
        admission.reserve("small", 4, soon(), owner="other")
    for _ in range(3):
        admission.reserve("small", 4, soon(0.02), owner="burst")
    assert admission.in_flight() == [24]


def test_a_document_returns_to_its_slot() -> None:
    admission = make([("small", 2)])
    assert admission.reserve("small", 3, soon()) == [0, 0, 0]
    assert admission.reserve("small", 3, soon(), document=77) == [1, 1, 1]
    for slot in (0, 0, 0, 1, 1, 1):
        admission.release(slot)
    assert admission.reserve("small", 3, soon(), document=77) == [1, 1, 1]
    assert admission.reserve("small", 3, soon(), document=78) == [0, 0, 0]


def test_what_waits_goes_to_the_slot_that_has_room_first(wait: Wait) -> None:
    admission = make([("small", 2)], queue=9)
    for slot in (0, 1):
        assert admission.reserve("small", 3, soon(), avoid={1 - slot}) == [slot] * 3
    requests = [wait(admission, "small", 3, soon()) for _ in range(3)]
    for request in requests:  # slot 0 is slow
        for _ in range(3):
            admission.release(1)
        assert request.future.result(5) == [1, 1, 1]


def test_a_retry_goes_before_the_queue_and_past_its_bound(wait: Wait) -> None:
    admission = full(queue=1)
    first = wait(admission, "small", 1, soon())
    retries = [wait(admission, "small", 1, soon(), avoid={0}, is_retry=True) for _ in range(2)]
    assert admission.num_waiting == 1
    for request in (*retries, first):  # the retries in the order of their arrival
        assert not request.future.done()
        admission.release(0)
        assert request.future.result(5) == [0]


def test_cancelling_after_the_reservation_leaves_it_as_it_is(wait: Wait) -> None:
    admission = make([("small", 1)])
    reservation = wait(admission, "small", 3, soon())
    assert reservation.future.result(5) == [0, 0, 0]
    reservation.cancel()
    assert admission.in_flight() == [3]


def test_a_retry_that_waits_for_another_slot_holds_up_no_request(wait: Wait) -> None:
    admission = make([("small", 2)])
    for slot in (1, 1, 1):
        admission.reserve("small", 1, soon(), avoid={1 - slot})
    retry = wait(admission, "small", 1, soon(), avoid={0}, is_retry=True)
    assert admission.reserve("small", 3, soon(0.5)) == [0, 0, 0]
    assert not retry.future.done()
    admission.release(1)
    assert retry.future.result(5) == [1]


def test_an_owner_that_floods_delays_another_by_one_request(wait: Wait) -> None:
    admission = full(queue=90, owner="flood")
    flood = [wait(admission, "small", 3, soon(), owner="flood") for _ in range(25)]
    other = wait(admission, "small", 3, soon(), owner="other")
    for _ in range(6):
        admission.release(0)
    assert other.future.result(5) == [0, 0, 0]
    assert sum(request.future.done() for request in flood) <= 1
    for request in flood:
        request.cancel()


def test_a_full_queue_takes_from_the_owner_with_the_most_branches_for_one_that_has_less(wait: Wait) -> None:
    admission = full(queue=9, owner="flood")
    flood = [wait(admission, "small", 3, soon(), owner="flood") for _ in range(3)]
    first = wait(admission, "small", 3, soon(), owner="other")
    with pytest.raises(Overloaded):
        flood[2].future.result(5)
    assert admission.num_waiting == 9
    # Now 6 against 3: a second request would make the shares equal, and is the newest.
    with pytest.raises(Overloaded):
        admission.reserve("small", 3, soon(), owner="other")
    third = wait(admission, "small", 1, soon(), owner="third")
    with pytest.raises(Overloaded):
        flood[1].future.result(5)
    assert admission.num_waiting == 7
    for request in (flood[0], first, third):
        assert not request.future.done()
        request.cancel()


def test_the_owners_branches_count_for_all_models_together(wait: Wait) -> None:
    admission = make([("small", 1), ("medium", 1)], queue=6)
    for model in ("small", "medium"):
        admission.reserve(model, 3, soon(), owner="flood")
    older = wait(admission, "small", 3, soon(), owner="flood")
    newer = wait(admission, "medium", 3, soon(), owner="flood")
    other = wait(admission, "small", 1, soon(), owner="other")
    with pytest.raises(Overloaded):
        newer.future.result(5)
    for request in (older, other):
        assert not request.future.done()
        request.cancel()


def test_the_early_check_refuses_what_would_be_refused_and_nothing_else(wait: Wait) -> None:
    admission = make([("small", 1)], queue=3)
    admission.check("flood")
    admission.reserve("small", 3, soon(), owner="flood")
    admission.check("flood")
    waiting = wait(admission, "small", 3, soon(), owner="flood")
    with pytest.raises(Overloaded):
        admission.check("flood")
    admission.check("other")
    waiting.cancel()
    admission.check("flood")


def test_the_early_check_passes_while_any_model_has_room() -> None:
    admission = make([("small", 1), ("medium", 1)], queue=0)
    admission.reserve("small", 3, soon())
    admission.check("")
    admission.reserve("medium", 3, soon())
    with pytest.raises(Overloaded):
        admission.check("")
    admission.release(1)
    admission.check("")


def test_a_model_whose_slots_stay_down_is_refused_at_once() -> None:
    admission = make([("small", 2), ("medium", 1)], max_down_s=0.0)
    admission.update(0, State(state="down"))
    admission.update(1, State(state="failed"))
    begin = time.monotonic()
    with pytest.raises(NotReady, match=r"ready \(1 down, 1 failed\), and none is expected soon") as caught:
        admission.reserve("small", 3, soon(30))
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
    with pytest.raises(NotReady, match="No worker of small is ready"):
        admission.reserve("small", 3, soon(0.02))


def revisions(admission: Admission, *revisions: str) -> None:
    """Set the revision of the slots' weights, in slot order."""
    for index, revision in enumerate(revisions):
        admission.update(index, State(state="warm", ms_per_token=1.0, revision=revision))


def test_all_branches_of_a_request_get_the_same_weights() -> None:
    admission = make([("small", 3)], max_batch=2)
    revisions(admission, "a", "b", "b")
    pin = RevisionPin()
    assert sorted(admission.reserve("small", 4, soon(), pin=pin)) == [1, 1, 2, 2]
    assert pin.revision == "b"
    with pytest.raises(DeadlineExceeded):  # slot 0 has room, but other weights
        admission.reserve("small", 1, soon(0.05), pin=pin, is_retry=True)
    admission.release(2, pin)
    assert admission.reserve("small", 1, soon(), pin=pin, is_retry=True) == [2]


def test_a_request_with_output_is_refused_when_its_weights_are_gone() -> None:
    admission = make([("small", 2)], max_down_s=0.0)
    revisions(admission, "a", "b")
    pin = RevisionPin()
    slots = admission.reserve("small", 2, soon(), pin=pin)
    pin.has_output = True
    revisions(admission, "b", "b")
    with pytest.raises(NotReady, match="the version of small"):
        admission.reserve("small", 1, soon(), pin=pin, is_retry=True)
    for slot in slots:
        admission.release(slot, pin)
    with pytest.raises(NotReady):
        admission.reserve("small", 1, soon(), pin=pin, is_retry=True)


def test_a_request_without_output_starts_again_with_other_weights_when_all_its_branches_have_failed(wait: Wait) -> None:
    admission = make([("small", 2)], max_down_s=0.0)
    revisions(admission, "a", "b")
    pin = RevisionPin()
    slots = admission.reserve("small", 2, soon(), pin=pin)
    revisions(admission, "b", "b")
    admission.release(slots[0], pin)
    first = wait(admission, "small", 1, soon(), pin=pin, is_retry=True)
    assert not first.future.done()  # the other branch may still give output with the old weights
    admission.release(slots[1], pin)
    assert first.future.result(5) == [0]
    assert pin.revision == "b"


def test_weights_of_a_slot_that_restarts_are_waited_for(wait: Wait) -> None:
    admission = make([("small", 2)])
    revisions(admission, "a", "b")
    pin = RevisionPin()
    slots = admission.reserve("small", 3, soon(), pin=pin)
    pin.has_output = True
    admission.update(0, State(state="down"))
    for slot in slots:
        admission.release(slot, pin)
    retry = wait(admission, "small", 1, soon(), pin=pin, avoid={0}, is_retry=True)
    revisions(admission, "a")
    assert retry.future.result(5) == [0]
