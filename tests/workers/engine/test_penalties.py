"""Penalties and biases in the engine: greedy text is what Python computes from the model's own distribution."""

from __future__ import annotations

import random

import pytest

from tests.workers.engine.helpers import generate, random_ids, running_engine
from workers.engine.loader import LoadedModel
from workers.engine.request import SamplingParams

VOCAB = 512  # of the tiny model
PARAMS = [
    SamplingParams(24, temperature=0, frequency_penalty=0.5),
    SamplingParams(24, temperature=0, presence_penalty=2.0),
    SamplingParams(24, temperature=0, frequency_penalty=-0.3, presence_penalty=-0.2),
    SamplingParams(24, temperature=0, frequency_penalty=1.5, presence_penalty=1.0, logit_bias=((3, 4.0), (9, -100.0))),
]


def penalized(distribution: dict[int, float], generated: list[int], params: SamplingParams) -> dict[int, float]:
    """Log-probabilities after the penalties and biases, up to a constant."""
    biases = dict(params.logit_bias)
    return {
        token: logprob
        - generated.count(token) * params.frequency_penalty
        - (token in generated) * params.presence_penalty
        + biases.get(token, 0.0)
        for token, logprob in distribution.items()
    }


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_greedy_text_follows_the_formula(tiny: LoadedModel, params: SamplingParams) -> None:
    """Tokens of the prompt do not count: the prompt holds the likeliest continuation many times."""
    rng = random.Random(1)
    whole = SamplingParams(1, temperature=0, top_logprobs=VOCAB)
    with running_engine(tiny) as engine:
        free = generate(engine, random_ids(rng, 20, VOCAB), SamplingParams(30, temperature=0))
        prompt = [*random_ids(rng, 5, VOCAB), *free.token_ids]
        ours = list(generate(engine, prompt, params).token_ids)
        plain = generate(engine, prompt, SamplingParams(24, temperature=0))
        for step, token in enumerate(ours):
            distribution = dict(generate(engine, [*prompt, *ours[:step]], whole).tops[0])
            scores = penalized(distribution, ours[:step], params)
            assert scores[token] == pytest.approx(max(scores.values()), abs=1e-4)
    assert ours != list(plain.token_ids)
