"""What follows a call that failed, without threads: bounds that hold for every history, and for all requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.pool.client import BranchError
from gateway.pool.retries import (
    MAX_ATTEMPTS,
    MAX_RETRY_RATIO,
    MAX_TRANSIENT_S,
    SCARCE_MEMORY,
    SLOT_FULL,
    STEP_S,
    TRANSIENT_CODES,
    WAIT_PAUSES_S,
    WINDOW_S,
    Attempts,
    RetryBudget,
)
from tests.gateway.clock import Clock

CODES = ("broken", "timeout", SCARCE_MEMORY, SLOT_FULL, *TRANSIENT_CODES)


def error(code: str, *, is_retryable: bool = True) -> BranchError:
    return BranchError(code, "", is_retryable=is_retryable)


def test_a_failed_branch_is_tried_thrice_on_other_slots() -> None:
    attempts = Attempts(0.0)
    for slot in range(MAX_ATTEMPTS):
        assert attempts.number == slot + 1
        assert attempts.waits_after(slot, error("broken"), 0.0) is None
        assert attempts.may_repeat_after(error("broken")) == (slot < MAX_ATTEMPTS - 1)
    assert attempts.tried_slots == {0, 1, 2}


def test_a_failure_that_every_slot_would_repeat_is_final_and_no_failure_keeps_frames() -> None:
    with pytest.raises(BranchError) as raised:
        raise error("broken", is_retryable=False)
    assert not Attempts(0.0).may_repeat_after(raised.value)
    assert raised.value.__traceback__ is None


def test_scarce_memory_is_tried_once_more_and_never_on_the_same_slot() -> None:
    attempts = Attempts(0.0)
    attempts.waits_after(0, error(SCARCE_MEMORY), 0.0)
    assert not attempts.excludes(0)
    assert attempts.may_repeat_after(error(SCARCE_MEMORY))
    assert (attempts.excludes(0), attempts.excludes(1)) == (True, False)
    assert not attempts.may_repeat_after(error(SCARCE_MEMORY))


def test_a_full_slot_is_waited_for_without_end_and_counts_as_no_attempt() -> None:
    attempts = Attempts(0.0)
    pauses = [attempts.waits_after(0, error(SLOT_FULL), now) for now in range(10)]
    assert pauses == [*WAIT_PAUSES_S, *[WAIT_PAUSES_S[-1]] * (10 - len(WAIT_PAUSES_S))]
    assert (attempts.number, attempts.is_first) == (1, False)


@pytest.mark.parametrize("code", sorted(TRANSIENT_CODES))
def test_a_worker_that_is_away_is_waited_for_briefly(code: str) -> None:
    attempts = Attempts(5.0)
    assert attempts.waits_after(0, error(code), 5.0 + MAX_TRANSIENT_S - 0.01) == WAIT_PAUSES_S[0]
    assert attempts.waits_after(0, error(code), 5.0 + MAX_TRANSIENT_S) is None


@given(st.lists(st.tuples(st.sampled_from(CODES), st.integers(0, 3), st.floats(0.0, 10.0)), max_size=30))
def test_whatever_fails_there_are_never_more_attempts_than_allowed(history: list[tuple[str, int, float]]) -> None:
    attempts, num_calls, tried = Attempts(0.0), 0, set()
    for code, slot, now in sorted(history, key=lambda step: step[2]):
        tried.add(slot)
        if attempts.waits_after(slot, error(code), now) is not None:
            assert code == SLOT_FULL or (code in TRANSIENT_CODES and now < MAX_TRANSIENT_S)
            continue
        num_calls += 1
        if not attempts.may_repeat_after(error(code)):
            break
    assert num_calls <= MAX_ATTEMPTS
    assert attempts.tried_slots == tried


def num_granted(budget: RetryBudget, number: int = 1000) -> int:
    return sum(budget.take_retry() for _ in range(number))


def test_branches_and_retries_count_for_the_length_of_the_window() -> None:
    clock = Clock()
    budget = RetryBudget(3, clock)
    budget.add_branches(100)
    assert num_granted(budget) == MAX_RETRY_RATIO * 100 == 10
    clock.now += WINDOW_S - 2 * STEP_S
    assert num_granted(budget) == 0
    clock.now += 3 * STEP_S
    assert num_granted(budget) == 3


def test_a_steady_share_of_failures_is_retried_without_end() -> None:
    clock = Clock()
    budget = RetryBudget(3, clock)
    for _ in range(600):
        clock.now += 0.1
        budget.add_branches(30)
        assert num_granted(budget, 3) == 3
