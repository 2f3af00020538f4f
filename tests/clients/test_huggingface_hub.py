"""huggingface_hub's `InferenceClient.text_generation`, unmodified, against the real pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.e2e.harness import Tercet

PROMPT = "The old man looked at the sea and"


@pytest.fixture(scope="module", params=["", "/generate"])
def client(request: pytest.FixtureRequest, tercet: Tercet) -> Iterator[InferenceClient]:
    """It posts to exactly the URL that it is given."""
    with InferenceClient(model=tercet.url + request.param) as client:
        yield client


def test_text_and_its_details(client: InferenceClient) -> None:
    sampling: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.8, "seed": 3}
    text = client.text_generation(PROMPT, **sampling)
    output = client.text_generation(PROMPT, **sampling, details=True, decoder_input_details=True, top_n_tokens=2)
    assert output.generated_text == text
    assert output.details is not None
    assert (output.details.finish_reason, output.details.generated_tokens) == ("length", 8)
    assert "".join(token.text for token in output.details.tokens) == text
    assert all(token.logprob <= 0 for token in output.details.tokens)
    assert "".join(token.text for token in output.details.prefill) == PROMPT
    assert output.details.seed == 3
    assert output.details.top_tokens is not None
    assert [len(tops) for tops in output.details.top_tokens] == [2] * 8
    full = client.text_generation(PROMPT, **sampling, return_full_text=True)
    assert full == PROMPT + text


def test_a_stream_holds_what_the_answer_holds(tercet: Tercet) -> None:
    with InferenceClient(model=tercet.url) as client:
        text = client.text_generation(PROMPT, max_new_tokens=8, seed=3)
        assert "".join(client.text_generation(PROMPT, max_new_tokens=8, seed=3, stream=True)) == text
        *outputs, last = client.text_generation(PROMPT, max_new_tokens=8, seed=3, stream=True, details=True)
    assert [output.generated_text for output in outputs] == [None] * 7
    assert last.generated_text == text
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 8)
    assert "".join(output.token.text for output in [*outputs, last]) == text


def test_best_of_and_stop(client: InferenceClient) -> None:
    output = client.text_generation(PROMPT, max_new_tokens=8, do_sample=True, best_of=2, details=True)
    assert output.details is not None
    assert output.details.best_of_sequences is not None
    assert len(output.details.best_of_sequences) == 1
    free = client.text_generation(PROMPT, max_new_tokens=12, do_sample=False)
    word = free.split()[2]
    stopped = client.text_generation(PROMPT, max_new_tokens=12, do_sample=False, stop=[word], details=True)
    assert stopped.details is not None
    assert stopped.details.finish_reason == "stop_sequence"
    assert free.startswith(stopped.generated_text.removesuffix(word))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("fields", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"watermark": True}])
def test_a_refusal_is_the_client_s_own_exception(fields: dict[str, float], is_stream: bool, tercet: Tercet) -> None:
    with InferenceClient(model=tercet.url) as client, pytest.raises(ValidationError) as refused:
        for _ in client.text_generation(PROMPT, stream=is_stream, **fields):
            pass
    [name] = fields
    assert name in str(refused.value)
