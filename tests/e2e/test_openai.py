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
tokenizer = Tokenizer.from_file(str(ROOT / "workers/checkpoints/embedded/tokenizer.json"))


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


def test_a_long_text_is_completed_from_its_end(client: OpenAI) -> None:
    text = "".join(f"On day {day} the old man looked at the sea. " for day in range(400))
    ids = ids_of(text)
    assert len(ids) > 2 * N_CTX
    answer = complete(client, text, temperature=0, max_tokens=8)
    assert answer.usage is not None
    num_used = answer.usage.prompt_tokens
    assert N_CTX // 2 < num_used <= N_CTX - 8
    assert texts(answer) == texts(complete(client, ids[-num_used:], temperature=0, max_tokens=8))


@pytest.mark.parametrize("ids", [[5], [0], [0, *ids_of(PROMPT)], (ids_of(PROMPT) * 200)[: N_CTX - 1]])
def test_an_echoed_prompt_has_a_log_probability_for_each_token_and_one_more(client: OpenAI, ids: list[int]) -> None:
    """As evaluation harnesses read them: a token is the likeliest if no other has a greater value."""
    answer = complete(client, [ids], echo=True, logprobs=1, max_tokens=1, temperature=0)
    [choice] = answer.choices
    assert choice.logprobs is not None
    tokens, values, tops = choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
    assert tokens is not None
    assert values is not None
    assert tops is not None
    assert len(values) == len(tops) == len(ids) + 1
    assert values[0] is None
    assert all(value <= max(top.values()) for value, top in zip(values[1:], tops[1:], strict=True))
    assert values[-1] == max(tops[-1].values())
    assert choice.text.startswith(tokenizer.decode(ids, skip_special_tokens=False))
    assert (tokens[0] == "<|endoftext|>") == (ids[0] == 0)
    # The same text is encoded to the same tokens, and the prompt alone has the same values.
    alone = complete(client, tokenizer.decode(ids, skip_special_tokens=False), echo=True, logprobs=0, max_tokens=0)
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs[1:] == pytest.approx(values[1:-1], abs=1e-3)
