"""A rate is a token bucket: exact in the long run, from any number of threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.middleware.rate_limits import MIN_KEPT, TokenBuckets
from shared.errors import QuotaExceeded
from tests.gateway.clock import Clock


def take(buckets: TokenBuckets, per_minute: int, num_tokens: int = 1, name: str = "a") -> None:
    """From a bucket of a minute's tokens."""
    buckets.take(name, num_tokens, size=per_minute, per_second=per_minute / 60, detail="Send it")


def is_taken(buckets: TokenBuckets, per_minute: int, num_tokens: int = 1, name: str = "a") -> bool:
    try:
        take(buckets, per_minute, num_tokens, name)
    except QuotaExceeded:
        return False
    return True


@pytest.fixture
def restless_threads() -> Iterator[None]:
    """Threads are switched as often as possible, so that a race shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("per_minute", [7, 60, 1200])
def test_eight_threads_get_the_rate_to_within_one_request(per_minute: int, restless_threads: None) -> None:
    clock = Clock()
    buckets = TokenBuckets(clock)
    num_steps, step_s = 80, 0.5
    num_taken = 0
    with ThreadPoolExecutor(8) as threads:
        for step in range(num_steps + 1):
            clock.now = 1000.0 + step * step_s
            num_attempts = per_minute + 20 if step == 0 else per_minute // 60 + 20
            num_taken += sum(threads.map(lambda _: is_taken(buckets, per_minute), range(num_attempts)))
    theory = per_minute + num_steps * step_s * per_minute / 60  # a full bucket, then the rate
    assert abs(num_taken - theory) <= 1


@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.floats(0, 90, allow_nan=False), st.integers(1, 40)), max_size=30),
)
def test_bursts_and_pauses_agree_with_a_bucket_of_tokens(per_minute: int, arrivals: list[tuple[float, int]]) -> None:
    clock = Clock()
    buckets = TokenBuckets(clock)
    tokens = float(per_minute)
    for pause_s, num_requests in arrivals:
        clock.now += pause_s
        tokens = min(per_minute, tokens + pause_s * per_minute / 60)
        num_taken = sum(is_taken(buckets, per_minute) for _ in range(num_requests))
        assert num_taken in {min(num_requests, int(tokens + rounding)) for rounding in (-1e-6, 1e-6)}
        tokens -= num_taken


def test_retry_after_says_when_the_next_request_fits_at_the_rate_that_holds_then() -> None:
    clock = Clock()
    buckets = TokenBuckets(clock)
    for _ in range(4):
        take(buckets, 4)
    with pytest.raises(QuotaExceeded) as caught:
        take(buckets, 4)
    assert caught.value.headers["Retry-After"] in {"15", "16", "17"}  # jitter on top of the exact time
    clock.now += 14.9
    assert not is_taken(buckets, 4)
    clock.now += 0.2
    assert is_taken(buckets, 4)
    clock.now += 60
    assert sum(is_taken(buckets, 600) for _ in range(700)) == 600


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_the_time_of_day_may_jump(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    buckets = TokenBuckets()
    assert is_taken(buckets, 1)
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + jump_s * 10**9)
    assert not is_taken(buckets, 1)


def test_buckets_that_have_refilled_are_dropped_and_no_other() -> None:
    clock = Clock()
    buckets = TokenBuckets(clock)
    for number in range(20 * MIN_KEPT):
        clock.now += 0.01
        assert is_taken(buckets, 60, name=str(number))  # full again after a second
        assert len(buckets) <= MIN_KEPT + 1
    for is_first in (True, False):
        assert all(is_taken(buckets, 1, name=f"held {number}") == is_first for number in range(3 * MIN_KEPT))


def test_what_costs_more_than_a_bucket_holds_is_taken_from_a_full_one_and_owed() -> None:
    clock = Clock()
    buckets = TokenBuckets(clock)
    assert is_taken(buckets, 12, num_tokens=36)
    for wait_s, num_tokens, expected in ((119, 1, False), (1, 1, False), (6, 1, True), (54, 36, False), (6, 36, True)):
        clock.now += wait_s
        assert is_taken(buckets, 12, num_tokens) == expected
