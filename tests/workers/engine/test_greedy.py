"""Greedy text in fp32 is transformers' greedy text, token for token."""

from __future__ import annotations

import random
from typing import Any

from tests.workers.engine.helpers import PROSE, assert_greedy, results, running_engine
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, SamplingParams


def test_embedded_checkpoint_continues_as_transformers_does(embedded: LoadedModel, reference: Any) -> None:
    """20 prompts of 1 to 500 tokens, 40 new tokens each, all 20 at once in our engine."""
    assert embedded.tokenizer is not None
    text = embedded.tokenizer.encode(PROSE * 12)
    rng = random.Random(1)
    lengths = [1, 2, 3, 15, 16, 17, 64, 127, 128, 129, 255, 256, 257, 300, 384, 400, 450, 490, 500]
    prompts = [text[start : start + length] for length in [*lengths, 33] for start in [rng.randrange(60)]]
    with running_engine(embedded) as engine:
        params = SamplingParams(max_new_tokens=40, temperature=0)
        ours = results(engine, [EngineRequest(tuple(ids), params, 0) for ids in prompts])
    for prompt, finished in zip(prompts, ours, strict=True):
        assert len(finished.token_ids) == 40 or finished.finish_reason == "eos"
        assert_greedy(reference, prompt, finished, 1e-3)
