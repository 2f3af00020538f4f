"""The workload W and its prompts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from deploy.load.prompts import PromptGenerator
from deploy.load.workload import LinearPass, Subject, W
from gateway.api.schema import parse_autocomplete_request
from workers.checkpoints.resolve import resolve


@pytest.fixture(scope="module")
def prompts() -> PromptGenerator:
    return PromptGenerator(Subject.of(resolve("embedded")).tokenizer(), seed=1)


def test_the_linear_layers_of_w_are_a_prefill_and_nineteen_decode_steps() -> None:
    assert W.linear_passes() == [LinearPass(64, 1, 1), LinearPass(3, 3, 19)]
    assert W.linear_passes(16) == [LinearPass(64, 1, 16), LinearPass(48, 48, 19)]


def test_the_gateway_accepts_the_workloads_body() -> None:
    request = parse_autocomplete_request(json.dumps(W.body("Once", 5, session="s")).encode())
    assert (request.n_samples, request.length, request.top_k, request.top_p, request.seed) == (3, 20, 50, 0.95, 5)


def test_prompts_have_the_exact_number_of_tokens_and_never_repeat(prompts: PromptGenerator) -> None:
    tokenizer = Subject.of(resolve("embedded")).tokenizer()
    texts = [prompts.text(64) for _ in range(50)]
    assert {len(tokenizer.encode(text)) for text in texts} == {64}
    assert len(set(texts)) == 50
    assert len(tokenizer.encode(prompts.text(512))) == 512


def test_documents_and_keystrokes_extend_what_was_typed(prompts: PromptGenerator) -> None:
    words = prompts.document(24)
    assert len(words) == 24
    assert not words[0].startswith(" ")
    assert words[11].endswith(".")
    keys = prompts.keystrokes(4)
    assert [len(typed) for typed in keys] == [2, 3, 4, 5]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(keys))
