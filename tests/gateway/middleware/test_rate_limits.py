"""A key's rate is a token bucket: exact in the long run, from any number of threads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.middleware.rate_limits import RateLimits
from shared.errors import QuotaExceeded
from tests.gateway.clock import Clock


def is_taken(limits: RateLimits, per_minute: int, key_id: str = "a") -> bool:
    try:
        limits.take(key_id, per_minute)
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
    limits = RateLimits(clock)
    num_steps, step_s = 80, 0.5
    num_taken = 0
    with ThreadPoolExecutor(8) as threads:
        for step in range(num_steps + 1):
            clock.now = 1000.0 + step * step_s
            num_attempts = per_minute + 20 if step == 0 else per_minute // 60 + 20
            num_taken += sum(threads.map(lambda _: is_taken(limits, per_minute), range(num_attempts)))
    theory = per_minute + num_steps * step_s * per_minute / 60  # a full bucket, then the rate
    assert abs(num_taken - theory) <= 1


@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.floats(0, 90, allow_nan=False), st.integers(1, 40)), max_size=30),
)
def test_bursts_and_pauses_agree_with_a_bucket_of_tokens(per_minute: int, arrivals: list[tuple[float, int]]) -> None:
    clock = Clock()
    limits = RateLimits(clock)
    tokens = float(per_minute)
    for pause_s, num_requests in arrivals:
        clock.now += pause_s
        tokens = min(per_minute, tokens + pause_s * per_minute / 60)
        num_taken = sum(is_taken(limits, per_minute) for _ in range(num_requests))
        assert num_taken in {min(num_requests, int(tokens + rounding)) for rounding in (-1e-6, 1e-6)}
        tokens -= num_taken


def test_retry_after_says_when_the_next_request_fits() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    for _ in range(4):
        limits.take("a", 4)
    with pytest.raises(QuotaExceeded) as caught:
        limits.take("a", 4)
    assert caught.value.headers["Retry-After"] in {"15", "16", "17"}  # jitter on top of the exact time
    assert "4 requests a minute" in caught.value.detail
    assert "in 15 s" in caught.value.detail
    clock.now += 14.9
    assert not is_taken(limits, 4)
    clock.now += 0.2
    assert is_taken(limits, 4)


def test_a_changed_rate_counts_from_then_on() -> None:
    clock = Clock()
    limits = RateLimits(clock)
    assert is_taken(limits, 1)
    assert not is_taken(limits, 1)
    clock.now += 60
    assert sum(is_taken(limits, 600) for _ in range(700)) == 600


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_the_time_of_day_may_jump(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    limits = RateLimits()
    assert is_taken(limits, 1)
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + jump_s * 10**9)
    assert not is_taken(limits, 1)
    assert is_taken(limits, 1, "another")
