"""OpenAI's completions API over the embedded checkpoint: what prompts, seeds and log-probabilities mean.

The openai SDK sends the requests. tests/clients/test_openai.py has what the SDK itself makes of answers and errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion
from tokenizers import Tokenizer

from tests.e2e.harness import ROOT, Tercet

pytestmark = pytest.mark.quick
N_CTX = 1024
PROMPT = "The old man looked at the sea and"
CHECKPOINT = ROOT / "workers/checkpoints/embedded"
tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture
def client(tercet: Tercet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tercet.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def complete(client: OpenAI, prompt: Any, **fields: Any) -> Completion:
    completion = client.completions.create(model="embedded", prompt=prompt, **fields)
    assert isinstance(completion, Completion)
    return completion


def texts(completion: Completion) -> list[str]:
    return [choice.text for choice in completion.choices]


def test_choices_are_those_of_consecutive_seeds_alone_for_each_prompt_of_a_list(client: OpenAI) -> None:
    """As text and as token ids."""
    prompts = [PROMPT, "She opened the door,", "It was"]
    alone = [
        complete(client, prompt, seed=11 + k, max_tokens=8).choices[0].text for prompt in prompts for k in range(3)
    ]
    assert len(set(alone)) == 9
    together = complete(client, prompts, n=3, seed=11, max_tokens=8)
    assert texts(together) == alone
    by_ids = complete(client, [ids_of(prompt) for prompt in prompts], n=3, seed=11, max_tokens=8)
    assert texts(by_ids) == alone
    assert by_ids.usage is not None
    assert together.usage is not None
    assert by_ids.usage.prompt_tokens == together.usage.prompt_tokens == sum(len(ids_of(text)) for text in prompts)


@pytest.mark.parametrize("prompt", [[[5] * N_CTX, [7] * N_CTX], " the" * N_CTX])
def test_prompts_that_fill_the_context_are_scored(client: OpenAI, prompt: Any) -> None:
    answer = complete(client, prompt, max_tokens=0, echo=True, logprobs=5)
    num_prompts = len(prompt) if isinstance(prompt, list) else 1
    assert len(answer.choices) == num_prompts
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompts * N_CTX, 0)
    for choice in answer.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        columns = choice.logprobs.model_dump()
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        rows = list(zip(*(columns[name] for name in names), strict=True))
        assert len(rows) == N_CTX
        for name, logprob, top, offset in rows:
            assert top is None or (5 <= len(top) <= 6 and top[name] == logprob)
            assert choice.text[offset : offset + len(name)] == name
    assert texts(complete(client, prompt, max_tokens=0)) == [""] * num_prompts


def test_a_writer_s_end_of_text_is_text_and_a_client_s_is_the_token(client: OpenAI, tercet: Tercet) -> None:
    prompt = "He typed <|endoftext|>"
    plain = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    plain.encode_special_tokens = True
    as_text = plain.encode(prompt).ids
    fields = {"temperature": 0, "max_tokens": 8}
    token, text = (texts(complete(client, ids, **fields))[0] for ids in (ids_of(prompt), as_text))
    assert token != text
    assert texts(complete(client, prompt, **fields)) == [token]
    answer = tercet.ask(prompt, clean=False, temperature=0, length=8, n_samples=1)
    assert [sentence["value"] for sentence in answer["sentences"]] == [text]
