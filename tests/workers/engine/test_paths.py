"""Ranked paths: the likeliest ways to begin a text with what was typed, against the model's own probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.workers.engine.helpers import CHECKPOINT, running_engine
from tests.workers.helpers import healing_of
from workers.engine.engine import Engine
from workers.engine.loader import LoadedModel, load_model
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["cpu", "cpu:0"])
def engine(embedded: LoadedModel, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine on each path; "cpu:0" selects that of the GPU."""
    is_gpu_path = request.param != "cpu"
    loaded = (
        load_model(CHECKPOINT, device=request.param, dtype="fp32", tokenizer=tokenizer) if is_gpu_path else embedded
    )
    with running_engine(loaded, max_batch=4) as engine:
        yield engine


def path_request(tokenizer: Tokenizer, text: str, rank: int, max_new_tokens: int = 3) -> EngineRequest:
    head, typed = healing_of(tokenizer).split(text)
    sampling = SamplingParams(max_new_tokens, temperature=0.0, path_rank=rank)
    return EngineRequest(
        tuple(tokenizer.encode(head)), sampling, 0, typed, tuple(tokenizer.encode(typed.decode())), group_size=8
    )


def paths(engine: Engine, tokenizer: Tokenizer, text: str) -> list[SequenceOutput]:
    """More sequences than the engine has rows: some wait."""
    streams = engine.submit_group([path_request(tokenizer, text, rank) for rank in range(8)])
    outputs = [stream.result() for stream in streams]
    assert not any(output.failure for output in outputs)
    return outputs


@pytest.mark.parametrize(
    "text", ["The old man looked at the sea and s", "She was sai", "The sea ", "It was the", "“Oh"]
)
def test_paths_are_ranked_by_the_probability_of_all_their_tokens(
    engine: Engine, tokenizer: Tokenizer, reference: Any, text: str
) -> None:
    outputs = paths(engine, tokenizer, text)
    head, typed = healing_of(tokenizer).split(text)
    prompt, forced = tokenizer.encode(head), tokenizer.encode(typed.decode())
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *forced]])).logits[0]
    logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 :]
    found: dict[tuple[int, ...], float] = {}
    for depth in range(len(forced) + 1):
        before = sum(float(logprobs[number, forced[number]]) for number in range(depth))
        rest = typed[sum(len(tokenizer.token_bytes(id_)) for id_ in forced[:depth]) :]
        for token in range(8192):
            data = tokenizer.token_bytes(token)
            if data.startswith(rest) and (len(data) > len(rest) or not rest):
                found[(*forced[:depth], token)] = before + float(logprobs[depth, token])
    total = math.log(sum(map(math.exp, found.values())))
    best = sorted(found, key=lambda path: -found[path])[:8]
    for path, output in zip(best, outputs, strict=True):
        assert output.token_ids[: len(path)] == path
        assert sum(output.logprobs[: len(path)]) == pytest.approx(found[path] - total, abs=1e-3)
        assert output.num_forced == len(path) - 1
        assert len(output.token_ids) == len(path) + 2


def test_the_rest_of_a_path_is_greedy(engine: Engine, tokenizer: Tokenizer) -> None:
    for output in paths(engine, tokenizer, "The old man looked at the sea and"):
        prompt = tokenizer.encode("The old man looked at the sea") + list(output.token_ids[:1])
        greedy = engine.submit(EngineRequest(tuple(prompt), SamplingParams(2, temperature=0.0), 0)).result()
        first_new = output.num_forced + 1
        if first_new == 1:
            assert output.token_ids[1:] == greedy.token_ids


def test_a_sequence_ends_when_its_tokens_are_too_unlikely(engine: Engine, tokenizer: Tokenizer) -> None:
    """After each step: a multi-step decode would compute tokens past the end."""
    for min_logprob in (-1.0, -3.0, -6.0):
        one = path_request(tokenizer, "The old man looked at the sea and", 0, 12)
        one = replace(one, group_size=1, sampling=structs.replace(one.sampling, min_logprob=min_logprob))
        output = engine.submit(one).result()
        assert output.finish_reason == "length"
        is_long = len(output.token_ids) - output.num_forced == 12
        assert is_long or sum(output.logprobs) < min_logprob <= sum(output.logprobs[:-1])
