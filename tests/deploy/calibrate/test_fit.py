"""The fit of temperature and threshold to synthetic data, where the answer is known."""

from __future__ import annotations

import math
import random

import pytest
from scipy.optimize import minimize_scalar

from deploy.calibrate.fit import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Group,
    Outcome,
    fit_temperature,
    fit_threshold,
    log_loss,
)


def outcomes(temperature: float, number: int = 40_000, seed: int = 0) -> list[Outcome]:
    """Words that are right with the probability exp(logprob ÷ temperature)."""
    rng = random.Random(seed)
    logprobs = [-rng.expovariate(0.7) for _ in range(number)]
    return [Outcome(logprob, rng.random() < math.exp(logprob / temperature)) for logprob in logprobs]


@pytest.mark.parametrize("temperature", [0.4, 0.8, 1.0, 1.7, 4.0])
def test_a_known_temperature_is_recovered(temperature: float) -> None:
    found = outcomes(temperature)
    fitted = fit_temperature(found)
    assert fitted == pytest.approx(temperature, rel=0.03)
    assert log_loss(found, fitted) <= log_loss(found, temperature)


def test_the_search_finds_what_scipy_finds() -> None:
    found = outcomes(1.3, 500, seed=7)
    best = minimize_scalar(lambda value: log_loss(found, value), bounds=(0.1, 10), method="bounded")
    assert fit_temperature(found) == pytest.approx(best.x, rel=1e-3)


@pytest.mark.parametrize(("is_right", "bound"), [(True, MAX_TEMPERATURE), (False, MIN_TEMPERATURE)])
def test_the_temperature_stays_within_the_range_of_the_setting(is_right: bool, bound: float) -> None:
    """Words of which all are right, or none, would take it to infinity or to 0."""
    fitted = fit_temperature([Outcome(-1.0, is_right)] * 10)
    assert fitted == pytest.approx(bound, rel=1e-3)
    assert MIN_TEMPERATURE <= fitted <= MAX_TEMPERATURE


def test_a_certain_word_that_is_wrong_has_a_finite_loss() -> None:
    assert log_loss([Outcome(0.0, False)], 1.0) == pytest.approx(-math.log(1e-6), rel=1e-3)
    assert log_loss([Outcome(math.log(0.25), True)], 0.5) == pytest.approx(-math.log(0.0625))


@pytest.mark.parametrize(("price", "threshold"), [(0.0, 0.1), (0.2, 0.5), (1.5, 2.0), (4.0, None)])
def test_the_threshold_is_where_showing_begins_to_pay(price: float, threshold: float | None) -> None:
    groups = [Group(0.5, 2, 1), Group(0.0, 1, 0), Group(2.0, 2, 6), Group(0.1, 5, 1)]
    assert fit_threshold(groups, price) == threshold
