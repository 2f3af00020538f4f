"""The n-gram cache: counts of a growing document, and the mixture as a probability distribution."""

from __future__ import annotations

import random

import pytest

from deploy.bench.quality.ngram_cache import NUM_ORDERS, Frequency, NgramIndex, Weight, mix

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


def test_the_longest_context_has_three_tokens() -> None:
    """a a a a a a: after three, a followed 3 times; after two, 4 times; after one, 5 times; in all 6 times."""
    assert index_of(*[A] * 6).frequencies(A) == [(6, 6), (5, 5), (4, 4), (3, 3)]


def test_the_beginning_has_no_contexts() -> None:
    assert index_of().frequencies(A) == []
    assert index_of(A).frequencies(A) == [(1, 1)]


def test_a_context_is_not_taken_for_another_of_the_same_tokens() -> None:
    """ "c" followed "a b", which has the tokens of "b a"; a is token 0."""
    assert index_of(A, B, C, B, A).frequencies(C) == [(1, 5), (0, 1)]


def test_an_extended_index_equals_one_that_is_built_at_once() -> None:
    rng = random.Random(0)
    token_ids = [rng.randrange(5) for _ in range(300)]
    whole, extended = index_of(*token_ids), NgramIndex()
    for token_id in token_ids:
        extended.extend([token_id])
    assert [extended.frequencies(token_id) for token_id in range(5)] == [
        whole.frequencies(token_id) for token_id in range(5)
    ]
    assert extended.num_tokens == whole.num_tokens == 300
    assert extended.num_bytes() == whole.num_bytes() > index_of(*token_ids[:100]).num_bytes()


def test_a_mixture_by_hand() -> None:
    """Share of order 0: 0.02 · 8 ÷ 9; then p = 8/450 · 1/8 + (1 − 8/450) · 0.1 = 0.1004444….
    Share of order 1: 0.05 · 2 ÷ 5 = 0.02; then p = 0.02 · 1/2 + 0.98 · 0.1004444… = 0.1084355….
    Share of order 2: 0.15 · 2 ÷ 4 = 0.075; then p = 0.075 · 1/2 + 0.925 · 0.1084355… = 0.1378029…."""
    frequencies = index_of(A, B, C, A, B, D, A, B).frequencies(C)
    assert mix(0.1, frequencies[:1], WEIGHTS) == pytest.approx(0.10044444444)
    assert mix(0.1, frequencies[:2], WEIGHTS) == pytest.approx(0.10843555556)
    assert mix(0.1, frequencies, WEIGHTS) == pytest.approx(0.13780288889)


def test_without_contexts_or_with_caps_of_zero_the_probability_is_the_models() -> None:
    assert mix(0.1, [], WEIGHTS) == 0.1
    assert mix(0.1, [Frequency(1, 2)] * NUM_ORDERS, [Weight(0, 1)] * NUM_ORDERS) == 0.1


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
