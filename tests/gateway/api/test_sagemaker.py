"""A SageMaker container's routes: which exist, which dialect answers a body, and what `/ping` says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from falcon import testing

from shared.protocol import GenerateRequest, State
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.conftest import MakeGateway
from tests.gateway.generation.stubs import Refusal, Step, completion

SAGEMAKER = {"sagemaker": "1", "hosts": "*"}


def respond(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, f" said {request.seed % 1000}", logprob=-1.0 - request.seed % 1000)


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api(respond, settings=SAGEMAKER, max_batch=48)


def test_the_ping_is_200_while_a_model_is_warm(make_gateway: MakeGateway) -> None:
    gateway = make_gateway(**SAGEMAKER)
    assert gateway.client.simulate_get("/ping").status_code == 503
    gateway.admission.update(1, State(state="warm"))  # of two models, one
    assert gateway.client.simulate_get("/ping").status_code == 200
    gateway.app.draining.set()
    assert gateway.client.simulate_get("/ping").status_code == 503


def test_only_two_routes_exist_and_need_no_key(make_gateway: MakeGateway, tmp_path: Path) -> None:
    gateway = make_gateway(**SAGEMAKER, keys=str(tmp_path / "keys"))
    assert gateway.app.resources.keys() == {"/ping", "/invocations"}
    assert gateway.client.simulate_post("/invocations", json={}).status_code == 422
    assert make_gateway().client.simulate_post("/invocations", json={}).status_code == 404


def test_each_body_gets_its_dialects_answer(api: Api) -> None:
    output = api.post("/invocations", {"input": "He"}).json["output"]
    assert [text.startswith("He said ") for text in output] == [True] * 3
    assert api.post("/invocations", {"inputs": "He"}).json[0]["generated_text"].startswith(" said")
    assert api.post("/invocations", {"prompt": "He"}).json["object"] == "text_completion"
    assert api.post("/invocations", {"context": "He", "clean": False}).json["sentences"]


def test_a_list_of_inputs_gets_a_list_of_three_texts_each_likeliest_first(api: Api) -> None:
    inputs = [f"text {number}" for number in range(10)]
    output = api.post("/invocations", {"input": inputs}).json["output"]
    assert [len(texts) for texts in output] == [3] * 10
    for given, texts in zip(inputs, output, strict=True):
        assert all(text.startswith(f"{given} said") for text in texts)
    assert api.post("/invocations", {"input": ["a"]}).json["output"][0][0].startswith("a said")


@pytest.mark.parametrize("value", [1, None, [], ["a"] * 11, [1], {"a": "b"}])
def test_an_input_of_another_kind_is_refused(api: Api, value: Any) -> None:
    answer = api.post("/invocations", {"input": value})
    assert (answer.status_code, answer.json["code"]) == (422, "invalid_request")
    assert answer.json["detail"].startswith("input must be a string, or a list of 1 to 10 strings")


def test_errors_have_the_shape_of_the_bodys_dialect(api: Api) -> None:
    def post(body: Any) -> testing.Result:
        return api.post("/invocations", body)

    unknown = post({"text": "x"})
    assert (unknown.status_code, unknown.headers["content-type"]) == (422, "application/problem+json")
    assert "input, inputs, prompt, context" in unknown.json["detail"]
    assert post([]).json["code"] == "invalid_json"
    assert post({"inputs": "x", "parameters": {"top_k": 0}}).json["error_type"] == "validation"
    assert post({"prompt": "x", "n": 0}).json["error"]["type"] == "invalid_request_error"
    assert post({"context": "x", "length": 0}).json["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [(Refusal(422, "invalid_request"), 422, "invalid_request"), (Refusal(500, "broken"), 503, "no_completion")],
)
def test_a_missing_text_is_an_error(make_api: MakeApi, refusal: Refusal, status: int, code: str) -> None:
    def fail_some(request: GenerateRequest) -> Iterator[Step]:
        if request.prompt == "b":
            yield refusal
        else:
            yield from respond(request)

    api = make_api(fail_some, settings=SAGEMAKER)
    assert len(api.post("/invocations", {"input": "a"}).json["output"]) == 3
    response = api.post("/invocations", {"input": ["a", "b"]})
    assert (response.status_code, response.json["code"]) == (status, code)


@pytest.mark.parametrize(
    ("attributes", "session"),
    [
        ("session=s1", "s1"),
        ("tenant=7; session=s1", "s1"),
        ("a=b,session=s1,c=d", "s1"),
        ("", None),
        ("obsession=s1", None),
        ("session=", None),
    ],
)
def test_custom_attributes_carry_a_session(api: Api, attributes: str, session: str | None) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": attributes}
    for body in ({"input": "He"}, {"inputs": "He"}, {"prompt": "He"}, {"context": "He"}):
        assert api.post("/invocations", body, headers=headers).status_code == 200
    assert {call.session for call in api.pool.workers[0].calls} == {session}
