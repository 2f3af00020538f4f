"""Each logits processor and warper does what transformers' class of that name does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from workers.engine.arithmetic_code import first_code
from workers.engine.draw import Draw
from workers.engine.logits_processors import (
    add_bias,
    apply_constraint,
    penalize_counts,
    penalize_repetition,
    process,
    warp,
)
from workers.engine.request import SamplingParams
from workers.text.token_healing import AllowedTokens

VOCAB = 300
CODE = first_code(0)
OFF = SamplingParams(temperature=1, top_k=0, top_p=0)


def logits_for(*seeds: int) -> torch.Tensor:
    return torch.stack([3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def transformers_probabilities(logits: torch.Tensor, params: SamplingParams, seen: Sequence[int] = ()) -> torch.Tensor:
    """The distribution [vocab] that transformers' own processor and warpers give."""
    ids, scores = torch.tensor([seen]), logits[None].clone()
    if params.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = TemperatureLogitsWarper(float(params.temperature))(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if 0 < params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    if 0 < params.typical_p < 1:
        scores = TypicalLogitsWarper(params.typical_p)(ids, scores)
    probs: torch.Tensor = scores[0].double().softmax(-1)
    return probs


def warped(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised probabilities of the candidates of one row, and their ids."""
    values, ids = logits.sort(descending=True)
    probs = warp(values[None], [torch.tensor([[limit]], dtype=torch.float64) for limit in params.limits])[0]
    return probs / probs.sum(), ids


@given(st.floats(0.5, 3), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.integers(0, 99))
def test_repetition_penalty_is_transformers_to_the_bit(penalty: float, seen: list[int], seed: int) -> None:
    logits = logits_for(seed)
    ours = penalize_repetition(logits, [Draw(SamplingParams(repetition_penalty=penalty), 0, 0, CODE, seen)])
    assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits.clone()))


def test_penalties_count_generated_tokens_by_openais_formula() -> None:
    logits = logits_for(6, 7, 8)
    before = logits.clone()
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25)
    draws = [
        Draw(params, 0, 0, CODE, seen=[9, 9, 4], generated=[4, 7, 7, 7]),
        Draw(params, 0, 0, CODE, seen=[9]),
        Draw(SamplingParams(), 0, 0, CODE, generated=[4]),
    ]
    ours = penalize_counts(logits, draws)
    expected = before.clone()
    expected[0, 4] -= 1 * 0.5 - 0.25
    expected[0, 7] -= 3 * 0.5 - 0.25
    torch.testing.assert_close(ours, expected)
    assert torch.equal(logits, before)
    assert penalize_counts(logits, draws[1:]) is logits


def test_a_bias_is_added_to_its_token_after_the_penalties() -> None:
    logits = logits_for(6, 7)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((5, -100.0), (4, 2.5)))
    draws = [Draw(params, 0, 0, CODE, seen=[4], generated=[4]), Draw(SamplingParams(), 0, 0, CODE)]
    ours = process(logits, draws)
    expected = before.clone()
    expected[0, 4] = (expected[0, 4] * 2 if expected[0, 4] < 0 else expected[0, 4] / 2) - 1.0 + 2.5
    expected[0, 5] -= 100
    torch.testing.assert_close(ours, expected)
    assert torch.equal(logits, before)
    assert add_bias(logits, draws[1:] * 2) is logits


def test_a_constraint_leaves_the_allowed_tokens_and_the_likeliest_exception() -> None:
    allowed = AllowedTokens(allowed=(3, 5, 70), if_likeliest=(9, 10), longer=frozenset({70}))
    logits = logits_for(3)
    logits[0, 9] = logits.max() + 1
    draws = [Draw(OFF, 0, 0, CODE, constraint=allowed)]
    constrained = apply_constraint(logits, draws)
    assert constrained.isfinite().nonzero()[:, 1].tolist() == [3, 5, 9, 70]
    assert torch.equal(constrained[0, [3, 5, 9, 70]], logits[0, [3, 5, 9, 70]])
    logits[0, 200] = logits.max() + 1
    assert apply_constraint(logits, draws).isfinite().nonzero()[:, 1].tolist() == [3, 5, 70]


@pytest.mark.parametrize(
    "params",
    [
        OFF,
        SamplingParams(temperature=1, top_k=0, top_p=1),
        SamplingParams(temperature=0.7, top_k=0, top_p=0),
        SamplingParams(temperature=1, top_k=17, top_p=0),
        SamplingParams(temperature=1, top_k=0, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=40, top_p=0.6),
        SamplingParams(temperature=1, top_k=0, top_p=0, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=60, top_p=0.9, min_p=0.05),
        SamplingParams(temperature=1, top_k=0, top_p=0, typical_p=0.2),
        SamplingParams(temperature=1.2, top_k=60, top_p=0.9, min_p=0.02, typical_p=0.7),
    ],
    ids=str,
)
def test_warpers_are_transformers(params: SamplingParams) -> None:
    logits = logits_for(4)
    probs, ids = warped(logits[0], params)
    expected = transformers_probabilities(logits[0].double(), params)[ids]
    assert ((probs > 0) == (expected > 0)).all()
    torch.testing.assert_close(probs, expected, rtol=1e-9, atol=0)


@given(st.floats(0.01, 0.99), st.floats(0.5, 3), st.integers(0, 10_000))
def test_typical_sampling_keeps_the_tokens_of_transformers_in_fp32(mass: float, spread: float, seed: int) -> None:
    logits = spread * logits_for(seed)
    params = SamplingParams(temperature=1, top_k=0, top_p=0, typical_p=mass)
    probs, ids = warped(logits[0], params)
    theirs = TypicalLogitsWarper(mass)(torch.tensor([[]]), logits)[0, ids]
    different = (probs > 0) != (theirs > float("-inf"))
    # The order of two tokens that are equally typical but for rounding decides which of them ends the set.
    assert different.sum() <= 1
