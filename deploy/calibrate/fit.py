"""The temperature and the threshold that fit predictions best.

Pure. Knows probabilities, outcomes and keys; does not know models and texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The range of TERCET_PREDICT_TEMPERATURE.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.1, 10.0
# Tolerance of the logarithm of the temperature.
TOLERANCE = 1e-4
# The probability of a word that nothing else can follow is 1; if the text goes another way, the loss stays finite.
MAX_LOGPROB = -1e-6


@dataclass(frozen=True, slots=True)
class Outcome:
    """A predicted word.

    Attributes:
        logprob: log-probability of the word and all words before it, as the model gives it.
        is_right: the text continues with it and all words before it.
        end: where the word ends, in characters of the prediction.
    """

    logprob: float
    is_right: bool
    end: int = 0


class Group(NamedTuple):
    """Suggestions that may be shown.

    Attributes:
        usefulness: keys that showing each of them should save, or at least that many.
        saved_keys: keys that taking their right words saves, all together: the words' characters, less one key each.
    """

    usefulness: float
    num_shown: int
    saved_keys: float


def log_loss(outcomes: Sequence[Outcome], temperature: float) -> float:
    """The mean of −log P(outcome), in nats, with P(right) = exp(logprob ÷ temperature)."""
    total = 0.0
    for outcome in outcomes:
        logprob = min(outcome.logprob, MAX_LOGPROB) / temperature
        total -= logprob if outcome.is_right else math.log(-math.expm1(logprob))
    return total / len(outcomes)


def fit_temperature(outcomes: Sequence[Outcome]) -> float:
    """The temperature with the least log-loss, by ternary search over its logarithm.

    The loss is convex in 1 ÷ temperature (−x is linear in it, −log(1 − eˣ) convex), so it has one minimum.

    Args:
        outcomes: at least one.
    """
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    while (third := (high - low) / 3) > TOLERANCE:
        if log_loss(outcomes, math.exp(low + third)) < log_loss(outcomes, math.exp(high - third)):
            high -= third
        else:
            low += third
    return math.exp((low + high) / 2)


def fit_threshold(groups: Iterable[Group], price: float, min_shown: int = 1) -> float | None:
    """The usefulness from which showing pays: shown from there on, suggestions save the most keys after the price.

    Args:
        groups: suggestions of equal usefulness together.
        price: keys that reading a suggestion costs.
        min_shown: suggestions that a group needs for its usefulness to be chosen.

    Returns:
        None if no threshold saves more than showing nothing.
    """
    best, total, threshold = 0.0, 0.0, None
    for group in sorted(groups, reverse=True):
        total += group.saved_keys - group.num_shown * price
        if group.num_shown >= min_shown and total > best:
            best, threshold = total, group.usefulness
    return threshold
