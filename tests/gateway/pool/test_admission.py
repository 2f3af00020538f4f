"""The feedback_store: bounded, fair within a model, never holding one model's requests behind another's."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.pool.admission import Admission
from shared.errors import DeadlineExceeded, NotReady, Overloaded
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


def test_never_more_in_flight_than_the_batch() -> None:
    admission = make([("small", 2)])
    assert admission.reserve("small", 3, soon()) == [0, 0, 0]
    assert admission.reserve("small", 3, soon()) == [1, 1, 1]
    with pytest.raises(DeadlineExceeded):
        admission.reserve("small", 1, soon(0.02))
    admission.release(0)
    assert admission.reserve("small", 1, soon()) == [0]
    assert admission.in_flight() == [3, 3]


def test_a_request_reserves_its_branches_together() -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 2, soon())
    with pytest.raises(DeadlineExceeded):
        admission.reserve("small", 2, soon(0.02))
    assert admission.in_flight() == [2]


def test_a_request_for_more_than_there_is_goes_in_waves() -> None:
    assert make([("small", 2)]).reserve("small", 8, soon()) == [0, 1, 0, 1, 0, 1]


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    admission = make([("small", 1)], queue=3)
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(admission.reserve, "small", 3, soon())
        while admission.num_waiting < 3:
            time.sleep(0.001)
        with pytest.raises(Overloaded) as caught:
            admission.reserve("small", 1, soon())
        assert caught.value.headers["Retry-After"] == "1"
        for _ in range(3):
            admission.release(0)
        assert waiting.result() == [0, 0, 0]
    assert admission.num_waiting == 0


def test_first_come_first_served_within_a_model() -> None:
    admission = make([("small", 1)])
    admission.reserve("small", 3, soon())
    order: list[int] = []

    def wait(number: int, num_branches: int) -> None:
        admission.reserve("small", num_branches, soon())
        order.append(number)

    threads = []
    for number, num_branches in enumerate([3, 1, 1]):
        threads.append(threading.Thread(target=wait, args=(number, num_branches)))
        threads[-1].start()
        while admission.num_waiting < sum([3, 1, 1][: number + 1]):
            time.sleep(0.001)
    admission.release(0)  # room for one, but three wait before it
    assert order == []
    for _ in range(2):
        admission.release(0)
    threads[0].join()
    assert order == [0]
    for _ in range(3):
        admission.release(0)
    for thread in threads:
        thread.join()


def test_another_models_requests_are_not_held_up() -> None:
    admission = make([("small", 1), ("medium", 1)])
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(admission.reserve, "small", 3, soon(0.3))
        while not admission.num_waiting:
            time.sleep(0.001)
        assert admission.reserve("medium", 3, soon()) == [1, 1, 1]
        with pytest.raises(DeadlineExceeded):
            waiting.result()


def test_waits_for_a_slot_that_is_not_warm_yet() -> None:
    admission = make([("small", 1)], warm=False)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(admission.reserve, "small", 3, soon())
        while not admission.num_waiting:
            time.sleep(0.001)
        admission.update(0, State(state="loading"))
        assert admission.num_waiting == 3
        admission.update(0, WARM)
        assert waiting.result() == [0, 0, 0]


def test_a_model_that_failed_to_load_everywhere_is_refused_at_once_with_the_reason() -> None:
    admission = make([("small", 2)], warm=False)
    for index in range(2):
        admission.update(index, State(state="failed", reason="no such file"))
    with pytest.raises(NotReady, match="no such file"):
        admission.reserve("small", 3, soon())


def test_a_document_returns_to_its_slot() -> None:
    admission = make([("small", 2)])
    assert admission.reserve("small", 3, soon()) == [0, 0, 0]
    assert admission.reserve("small", 3, soon(), document=77) == [1, 1, 1]
    for slot in (0, 0, 0, 1, 1, 1):
        admission.release(slot)
    assert admission.reserve("small", 3, soon(), document=77) == [1, 1, 1]


def test_a_retry_goes_before_the_queue_and_past_its_bound() -> None:
    admission = make([("small", 1)], queue=1)
    admission.reserve("small", 3, soon())
    with ThreadPoolExecutor() as pool:
        later = pool.submit(admission.reserve, "small", 1, soon())
        while not admission.num_waiting:
            time.sleep(0.001)
        retry = pool.submit(admission.reserve, "small", 1, soon(), avoid={0}, is_retry=True)
        while len(admission._waiters) < 2:
            time.sleep(0.001)
        admission.release(0)
        assert retry.result() == [0]
        assert not later.done()
        admission.release(0)
        assert later.result() == [0]
