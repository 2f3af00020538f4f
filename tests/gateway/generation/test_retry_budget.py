"""The retry budget: a floor, a share of the branches started, and a window that slides."""

from __future__ import annotations

from gateway.generation.retry_budget import MAX_RETRY_RATIO, STEP_S, WINDOW_S, RetryBudget
from tests.gateway.clock import Clock


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
