"""The n-gram cache and the scorer: counts of a growing document, and probabilities to mix them with."""

from __future__ import annotations

import pytest

from tests.bench.quality.ngram_cache import NgramIndex, Weight, mix
from tests.bench.quality.prompt_scorer import PromptScorer
from tests.bench.run import Options

WEIGHTS = [Weight(0.02, 1), Weight(0.05, 3), Weight(0.15, 2), Weight(0.3, 2)]
A, B, C, D = range(4)


def index_of(*token_ids: int) -> NgramIndex:
    index = NgramIndex()
    index.extend(token_ids)
    return index


def test_a_mixture_by_hand() -> None:
    """Share of order 0: 0.02 · 8 ÷ 9; then p = 8/450 · 1/8 + (1 − 8/450) · 0.1 = 0.1004444….
    Share of order 1: 0.05 · 2 ÷ 5 = 0.02; then p = 0.02 · 1/2 + 0.98 · 0.1004444… = 0.1084355….
    Share of order 2: 0.15 · 2 ÷ 4 = 0.075; then p = 0.075 · 1/2 + 0.925 · 0.1084355… = 0.1378029…."""
    frequencies = index_of(A, B, C, A, B, D, A, B).frequencies(C)
    assert mix(0.1, frequencies[:1], WEIGHTS) == pytest.approx(0.10044444444)
    assert mix(0.1, frequencies[:2], WEIGHTS) == pytest.approx(0.10843555556)
    assert mix(0.1, frequencies, WEIGHTS) == pytest.approx(0.13780288889)


def test_tokens_are_scored_after_all_tokens_before_them() -> None:
    scorer = PromptScorer(Options(models="embedded", settings={"dtype": "fp32"}))
    ids = scorer.tokenizer.encode("It was a dark and stormy night, and the rain fell")
    logprobs = scorer.logprobs(ids[:2], ids[2:])
    assert len(logprobs) == len(ids) - 2
    assert logprobs[4:] == pytest.approx(scorer.logprobs(ids[:6], ids[6:]), abs=1e-4)
