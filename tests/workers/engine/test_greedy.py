"""Greedy text in fp32 is transformers' greedy text, token for token."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import GPT2LMHeadModel

from tests.workers.engine.helpers import PROSE, generate, results, running_engine
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, SamplingParams


def hf_greedy(model: GPT2LMHeadModel, prompt: list[int], number: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=number,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


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
        assert list(finished.token_ids) == hf_greedy(reference, prompt, 40)


def test_first_ranks_give_different_starts(embedded: LoadedModel) -> None:
    assert embedded.tokenizer is not None
    prompt = embedded.tokenizer.encode("She opened the door, and")
    with running_engine(embedded) as engine:
        first = generate(engine, prompt, SamplingParams(1, temperature=0, top_logprobs=80))
        for rank in (0, 1, 2, 70):
            params = SamplingParams(8, temperature=0, first_rank=rank)
            ranked = generate(engine, prompt, params)
            assert ranked.token_ids[0] == first.tops[0][rank][0]
            rest = generate(engine, [*prompt, ranked.token_ids[0]], SamplingParams(7, temperature=0))
            assert ranked.token_ids[1:] == rest.token_ids
