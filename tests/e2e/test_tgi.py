"""The unmodified `huggingface_hub` client, and the requests of published deployments, against the real pools."""

from __future__ import annotations

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

from tests.e2e.harness import Tercet

PROMPT = "The old man looked at the sea and"


@pytest.fixture(params=["", "/generate"], ids=["root", "generate"])
def client(tercet: Tercet, request: pytest.FixtureRequest) -> InferenceClient:
    return InferenceClient(model=tercet.url + request.param, timeout=30)


def test_a_plain_completion_is_a_string(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=8)
    assert text
    assert text == client.text_generation(PROMPT, max_new_tokens=8)
    assert client.text_generation(PROMPT, max_new_tokens=8, return_full_text=True) == PROMPT + text


def test_a_stream_yields_the_text_of_each_token(client: InferenceClient) -> None:
    whole = client.text_generation(PROMPT, max_new_tokens=12)
    texts = list(client.text_generation(PROMPT, max_new_tokens=12, stream=True))
    assert "".join(texts) == whole
    assert len(texts) == 12


def test_a_refusal_raises_the_clients_own_class(client: InferenceClient) -> None:
    for stream in (False, True):
        with pytest.raises(ValidationError, match=r"parameters\.temperature must be a number from 0"):
            list(client.text_generation(PROMPT, temperature=-1, stream=stream))
    with pytest.raises(ValidationError, match="1024"):  # the worker refuses, and names the counts
        client.text_generation("word " * 2000, max_new_tokens=10)
    # What ends at the limits of time and context depends on the machine, so each text is short.
    assert client.text_generation("word " * 2000, max_new_tokens=2, truncate=500)
    with pytest.raises(ValidationError, match="adapter_id"):
        client.text_generation(PROMPT, adapter_id="x")
    # What only changes the text is ignored, with a warning in the answer.
    assert client.text_generation(PROMPT, watermark=True, max_new_tokens=2)
    texts = {
        client.text_generation(PROMPT, typical_p=typical_p, seed=3, max_new_tokens=20) for typical_p in (0.2, 0.2, 1)
    }
    assert len(texts) == 2


def test_the_clients_endpoint_routes_answer(tercet: Tercet) -> None:
    client = InferenceClient(model=tercet.url, provider="hf-inference")
    info = client.get_endpoint_info()
    assert (info["model_id"], info["max_total_tokens"]) == ("embedded", 1024)
    assert client.health_check()
