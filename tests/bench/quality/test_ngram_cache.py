"""The n-gram cache and the scorer: counts of a growing document, and probabilities to mix them with."""

from __future__ import annotations

import random

import pytest

from deploy.load.options import Options
from tests.bench.quality.ngram_cache import NUM_ORDERS, NgramIndex, Weight, mix
from tests.bench.quality.prompt_scorer import PromptScorer

WEIGHTS = [Weight(0.02, 1), Weight(0.05, 3), Weight(0.15, 2), Weight(0.3, 2)]
A, B, C, D = range(4)


def index_of(*token_ids: int) -> NgramIndex:
    index = NgramIndex()
    index.extend(token_ids)
    return index


def test_frequencies_are_those_after_the_last_tokens() -> None:
    """a b c a b d a b: c and d followed "a b" once each. The three tokens "d a b" are new, so nothing followed them."""
    index = index_of(A, B, C, A, B, D, A, B)
    assert index.frequencies(C) == [(1, 8), (1, 2), (1, 2)]
    assert index.frequencies(A) == [(3, 8), (0, 2), (0, 2)]


def test_a_mixture_by_hand() -> None:
    """Share of order 0: 0.02 · 8 ÷ 9; then p = 8/450 · 1/8 + (1 − 8/450) · 0.1 = 0.1004444….
    Share of order 1: 0.05 · 2 ÷ 5 = 0.02; then p = 0.02 · 1/2 + 0.98 · 0.1004444… = 0.1084355….
    Share of order 2: 0.15 · 2 ÷ 4 = 0.075; then p = 0.075 · 1/2 + 0.925 · 0.1084355… = 0.1378029…."""
    frequencies = index_of(A, B, C, A, B, D, A, B).frequencies(C)
    assert mix(0.1, frequencies[:1], WEIGHTS) == pytest.approx(0.10044444444)
    assert mix(0.1, frequencies[:2], WEIGHTS) == pytest.approx(0.10843555556)
    assert mix(0.1, frequencies, WEIGHTS) == pytest.approx(0.13780288889)


def test_mixtures_sum_to_one_at_each_position() -> None:
    rng = random.Random(1)
    vocab_size = 7
    index = NgramIndex()
    for token_id in rng.choices(range(vocab_size), range(vocab_size), k=100):
        masses = [rng.random() for _ in range(vocab_size)]
        mixtures = [mix(mass / sum(masses), index.frequencies(token), WEIGHTS) for token, mass in enumerate(masses)]
        assert sum(mixtures) == pytest.approx(1)
        index.extend([token_id])
    assert len(index.frequencies(0)) == NUM_ORDERS


def test_tokens_are_scored_after_all_tokens_before_them() -> None:
    scorer = PromptScorer(Options(models="embedded", settings={"dtype": "fp32"}))
    ids = scorer.tokenizer.encode("It was a dark and stormy night, and the rain fell")
    logprobs = scorer.logprobs(ids[:2], ids[2:])
    assert len(logprobs) == len(ids) - 2
    assert logprobs[4:] == pytest.approx(scorer.logprobs(ids[:6], ids[6:]), abs=1e-4)
    assert scorer.prefill_ms(ids) > 0
