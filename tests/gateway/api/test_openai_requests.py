"""Fields of `/v1/completions`, their bounds, and errors in OpenAI's shape, in this process over stub workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from falcon import testing
from openai import OpenAI

from gateway.api.operation import JSON
from shared.api_keys import new_key
from shared.protocol import Accepted, GenerateRequest
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.api.openai_stub import N_CTX, chunks_of, complete, post, words
from tests.gateway.api.test_openapi import declared_response, validator
from tests.gateway.conftest import MakeGateway
from tests.gateway.generation.stubs import Refusal, Step, completion, make_done


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api(words)


# Fields ------------------------------------------------------------------------------------------


def test_more_tokens_than_the_context_are_lowered_to_half_of_it_with_a_warning(api: Api) -> None:
    [warning] = complete(api, max_tokens=4096)["warnings"]
    assert "max_tokens" in warning
    [call] = api.pool.workers[0].calls
    assert (call.sampling.max_new_tokens, call.max_prompt_tokens) == (N_CTX // 2, N_CTX - N_CTX // 2)
    assert "warnings" not in complete(api, max_tokens=N_CTX - 1)


def test_the_completions_before_a_suffix_are_in_the_order_of_their_fits(make_api: MakeApi) -> None:
    def fills(request: GenerateRequest) -> Iterator[Step]:
        yield Accepted()
        text = f" w{request.seed}"
        yield make_done([text, " x"], text=text, ends=[len(text)] * 2, fit=float(request.seed % 10))

    api = make_api(fills)
    answer = complete(api, suffix=" the end", n=3)
    assert [choice["text"] for choice in answer["choices"]] == [" w42", " w41", " w40"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert "warnings" not in answer
    [best] = complete(api, suffix=" the end", best_of=3)["choices"]
    assert best["text"] == " w42"
    chunks = chunks_of(post(api, suffix=" the end", n=2, stream=True))
    texts = {part["index"]: part["text"] for chunk in chunks for part in chunk["choices"]}
    assert texts == {0: " w40", 1: " w41"}
    assert {(call.suffix, call.stream) for call in api.pool.workers[0].calls} == {(" the end", False)}
    post(api, suffix=" the end", max_tokens=0, echo=True)  # nothing is generated
    assert api.pool.workers[0].calls[-1].suffix == ""


# Errors ------------------------------------------------------------------------------------------


def test_a_choice_that_is_missing_is_an_error(make_api: MakeApi) -> None:
    """A caller of an SDK indexes the choices."""

    def respond(request: GenerateRequest) -> Iterator[Step]:
        if request.seed == 41:
            yield Refusal(500, "failed")
        else:
            yield from words(request)

    response = post(make_api(respond), n=3)
    assert (response.status_code, response.json["error"]["type"]) == (503, "server_error")


def test_a_text_that_is_cut_by_the_time_limit_has_the_reason_length(make_api: MakeApi) -> None:
    def respond(request: GenerateRequest) -> Iterator[Step]:
        yield from completion(request, " the sea", finish_reason="deadline")

    [choice] = complete(make_api(respond))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" the sea", "length")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/v1/chat/completions", 404, "not_found"),
        ("GET", "/v1/files", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_what_is_not_served_is_an_error_that_says_what_is(
    api: Api, method: str, path: str, status: int, code: str
) -> None:
    response = api.request(method, path, body=b"{}")
    assert (response.status_code, response.json["error"]["code"]) == (status, code)
    if status == 404:
        assert "POST /v1/completions" in response.json["error"]["message"]


def test_errors_of_keys_are_exceptions_of_the_sdk(make_gateway: MakeGateway, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "first", rate=2)[0]
    transport = httpx2.WSGITransport(app=make_gateway(keys=str(tmp_path / "keys")).app)
    with OpenAI(
        base_url="http://localhost/v1", api_key=key, max_retries=0, http_client=httpx2.Client(transport=transport)
    ) as sdk:
        with pytest.raises(openai.AuthenticationError) as refused:
            sdk.with_options(api_key="wrong").models.list()
        assert [model.id for model in sdk.models.list()] == ["small", "medium"]
        with pytest.raises(openai.NotFoundError):
            sdk.chat.completions.create(model="small", messages=[])
        with pytest.raises(openai.RateLimitError) as limited:
            sdk.completions.create(model="small", prompt="a")
    assert (refused.value.type, refused.value.code) == ("authentication_error", "invalid_api_key")
    assert (limited.value.type, limited.value.code) == ("rate_limit_error", "rate_limit_exceeded")
    assert int(limited.value.response.headers["retry-after"]) >= 1


def test_answers_chunks_and_errors_match_the_document(api: Api) -> None:
    document = api.request("GET", "/openapi.json").json
    operation = document["paths"]["/v1/completions"]["post"]

    def check(response: testing.Result) -> None:
        declared = declared_response(document, operation, response.status_code)
        validate = validator(document, declared["content"][response.headers["content-type"]]["schema"]).validate
        if response.headers["content-type"] == JSON:
            validate(response.json)
            return
        for chunk in chunks_of(response):
            validator(document, {"$ref": "#/components/schemas/Completion"}).validate(chunk)
            validate({"data": json.dumps(chunk)})
        validate({"data": "[DONE]"})

    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "suffix": "x", "stream_options": {"include_usage": True}}
    check(post(api, **fields, stream=True))
    check(post(api, **{**fields, "stream_options": None}))
    check(post(api))
    check(post(api, max_tokens=-3))
    check(post(api, max_tokens=-1, ignore_eos=True))
    check(post(api, model="gpt-4"))
    check(post(api, prompt=[[1] * 2000]))
