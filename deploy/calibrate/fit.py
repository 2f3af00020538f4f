"""The temperature and the threshold that fit predictions best.

Pure. Knows probabilities, outcomes and keys; does not know models and texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The range of TERCET_PREDICT_TEMPERATURE.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.1, 10.0
# Tolerance of the logarithm of the temperature.
TOLERANCE = 1e-4
# The probability of a word that nothing else can follow is 1; if the text goes another way, the loss stays finite.
MAX_LOGPROB = -1e-6
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """A predicted word: its log-probability as the model gives it, and whether it was right."""

    logprob: float
    is_right: bool


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggestion that may be shown.

    Attributes:
        usefulness: keys that showing it should save.
        saved_keys: keys that taking its right words saves: their characters, less one key; 0 if the first is wrong.
    """

    usefulness: float
    saved_keys: int


def log_loss(outcomes: Sequence[Outcome], temperature: float) -> float:
    """The mean of −log P(outcome), in nats, with P(right) = exp(logprob ÷ temperature)."""
    total = 0.0
    for outcome in outcomes:
        logprob = min(outcome.logprob, MAX_LOGPROB) / temperature
        total -= logprob if outcome.is_right else math.log(-math.expm1(logprob))
    return total / len(outcomes)


def fit_temperature(outcomes: Sequence[Outcome]) -> float:
    """The temperature with the least log-loss, by golden-section search over its logarithm.

    The loss is convex in 1 ÷ temperature (−x is linear in it, −log(1 − eˣ) convex), so it has one minimum.

    Raises:
        ValueError: no outcomes.
    """
    if not outcomes:
        raise ValueError("There are no outcomes to fit a temperature to.")
    best = _minimum(
        lambda value: log_loss(outcomes, math.exp(value)), math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    )
    return math.exp(best)


def fit_threshold(suggestions: Sequence[Suggestion], price: float) -> float | None:
    """The usefulness from which showing pays: shown from there on, suggestions save the most keys after the price.

    Args:
        price: keys that reading a suggestion costs.

    Returns:
        None if no threshold saves more than showing nothing.
    """
    best, total, threshold = 0.0, 0.0, None
    order = sorted(suggestions, key=lambda suggestion: -suggestion.usefulness)
    for index, suggestion in enumerate(order):
        total += suggestion.saved_keys - price
        is_last = index + 1 == len(order) or order[index + 1].usefulness < suggestion.usefulness
        if is_last and total > best:
            best, threshold = total, suggestion.usefulness
    return threshold


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between `low` and `high` has it (golden-section search, Kiefer 1953)."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > TOLERANCE:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2
