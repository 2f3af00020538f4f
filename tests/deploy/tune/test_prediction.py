"""The prediction of latencies, against queues whose latencies are known, and against a simulated server."""

from __future__ import annotations

import random
from math import inf
from statistics import fmean

import pytest

from deploy.tune.prediction import LatencyModel, interpolate
from deploy.tune.results import Load
from tests.deploy.tune.figures import closed_loops, figures


def test_a_server_that_gains_nothing_from_concurrency_is_an_m_m_1_queue() -> None:
    model = LatencyModel.fit(closed_loops([100, 200, 400, 800]))
    assert model.capacity_qps == pytest.approx(10)
    for rate in (1.0, 5.0, 9.0):
        assert model.open_ms(rate) == pytest.approx(1e3 / (10 - rate), rel=1e-6)


def test_two_servers_are_an_m_m_2_queue() -> None:
    model = LatencyModel.fit(closed_loops([100, 100, 200, 400]))
    for rate in (4.0, 10.0, 18.0):
        utilisation = rate / 20
        assert model.open_ms(rate) == pytest.approx(100 / (1 - utilisation**2), rel=1e-6)


def test_latencies_do_not_depend_on_the_distribution_of_service_times() -> None:
    """A simulated server whose requests share it, each with the same amount of work, as a batch's rows do."""
    completions = {1: 10.0, 2: 16.0, 3: 16.0, 4: 16.0}  # per second, by requests in the system
    model = LatencyModel.fit(closed_loops([1e3 * number / completions[min(number, 4)] for number in (1, 2, 4, 8)]))
    randomness = random.Random(5)
    now_s, left, latencies = 0.0, {}, []  # type: ignore[var-annotated]
    next_arrival_s = 0.0
    while len(latencies) < 30_000:
        number = len(left)
        speed = completions[min(number, 4)] / number if number else 0.0  # of each request; its work is 1
        ends_s = now_s + min(left.values()) / speed if number else inf
        event_s = min(ends_s, next_arrival_s)
        left = {arrived_s: work - speed * (event_s - now_s) for arrived_s, work in left.items()}
        now_s = event_s
        if ends_s <= next_arrival_s:
            done = min(left, key=left.__getitem__)
            latencies.append(1e3 * (now_s - done))
            del left[done]
        else:
            left[now_s] = 1.0
            next_arrival_s = now_s + randomness.expovariate(8.0)
    assert model.open_ms(8.0) == pytest.approx(fmean(latencies), rel=0.03)


def test_what_open_loops_show_corrects_the_model_between_their_rates() -> None:
    closed = closed_loops([100, 200, 400, 800])
    plain = LatencyModel.fit(closed)
    measured = [figures(Load(rate_qps=rate), rate, ratio * plain.open_ms(rate)) for rate, ratio in ((2, 1.2), (6, 1.4))]
    model = LatencyModel.fit([*closed, *measured])
    assert model.open_ms(2) == pytest.approx(1.2 * plain.open_ms(2))
    assert model.open_ms(4) == pytest.approx(1.3 * plain.open_ms(4))
    assert model.open_ms(8) == pytest.approx(1.4 * plain.open_ms(8))


def test_an_open_loop_beyond_the_capacity_corrects_nothing() -> None:
    closed = closed_loops([100, 200, 400, 800])
    model = LatencyModel.fit([*closed, figures(Load(rate_qps=11), 10, 5000)])
    assert model == LatencyModel.fit(closed)
    assert model.open_ms(10) == inf


def test_the_highest_rate_is_where_the_latency_is_reached() -> None:
    model = LatencyModel.fit(closed_loops([100, 200, 400, 800]))
    assert model.highest_rate(500) == pytest.approx(8, rel=0.01)
    assert model.highest_rate(90) == 0


def test_interpolation_keeps_the_nearest_value_outside() -> None:
    points = [(1.0, 10.0), (3.0, 30.0)]
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 9)] == [10, 10, 20, 30, 30]
