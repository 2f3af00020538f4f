"""A SageMaker container's routes: which exist, which dialect answers a body, and what `/ping` says."""

from __future__ import annotations

import json
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
LINES = "application/jsonlines"


def respond(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, f" said {request.seed % 1000}", logprob=-1.0 - request.seed % 1000)


def send(api: Api, media_type: str, body: bytes) -> testing.Result:
    return api.request("POST", "/invocations", body=body, headers={"Content-Type": media_type})


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
    assert gateway.app.routes.keys() == {"/ping", "/invocations"}
    assert gateway.client.simulate_post("/invocations", json={}).status_code == 422
    assert make_gateway().client.simulate_post("/invocations", json={}).status_code == 404


def test_each_body_has_its_dialect_alone_and_as_a_line(api: Api) -> None:
    bodies = [{"input": "He"}, {"inputs": "b"}, {"text_inputs": "d"}, {"prompt": "a"}, {"context": "e", "clean": False}]
    lines = send(api, LINES, b"\n".join(json.dumps(body).encode() for body in bodies)).text.splitlines()
    for answers in ([api.post("/invocations", body).json for body in bodies], [json.loads(line) for line in lines]):
        patsnap, tgi, jumpstart, openai, own = answers
        assert [text.startswith("He said ") for text in patsnap["output"]] == [True] * 3
        assert tgi[0]["generated_text"].startswith(" said")
        assert jumpstart["generated_texts"][0].startswith(" said")
        assert openai["object"] == "text_completion"
        assert own["sentences"]


def test_a_list_of_inputs_gets_a_list_of_three_texts_each_likeliest_first(api: Api) -> None:
    inputs = [f"text {number}" for number in range(10)]
    output = api.post("/invocations", {"input": inputs}).json["output"]
    assert [len(texts) for texts in output] == [3] * 10
    for given, texts in zip(inputs, output, strict=True):
        assert all(text.startswith(f"{given} said") for text in texts)
    assert api.post("/invocations", {"input": ["a"]}).json["output"][0][0].startswith("a said")


@pytest.mark.parametrize("value", [1, [], ["a"] * 11, [1], {"a": "b"}])
def test_an_input_of_another_kind_is_refused(api: Api, value: Any) -> None:
    answer = api.post("/invocations", {"input": value})
    assert (answer.status_code, answer.json["code"]) == (422, "invalid_request")
    assert answer.json["detail"].startswith("input must be a string, or a list of 1 to 10 strings")


def test_errors_have_the_shape_of_the_bodys_dialect(api: Api) -> None:
    def post(body: Any) -> testing.Result:
        return api.post("/invocations", body)

    unknown = post({"text": "x"})
    assert (unknown.status_code, unknown.headers["content-type"]) == (422, "application/problem+json")
    assert "input, inputs, text_inputs, prompt, context" in unknown.json["detail"]
    assert post([]).json["code"] == "invalid_json"
    assert post({"inputs": "x", "parameters": {"top_k": -2}}).json["error_type"] == "validation"
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


@pytest.mark.parametrize("media_type", [LINES, "application/x-jsonlines; a=b", "application/x-ndjson"])
def test_json_lines_are_answered_line_by_line(api: Api, media_type: str) -> None:
    for ends in (b"%s\n%s\n", b"%s\r\n%s", b"\n%s\n\n%s\n\n"):
        answer = send(api, media_type, ends % (b'{"input":"a"}', b'{"input":"b"}'))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == media_type.partition(";")[0]
        assert answer.text.endswith("\n")
        outputs = [json.loads(line)["output"] for line in answer.text.splitlines()]
        assert [texts[0][:6] for texts in outputs] == ["a said", "b said"]


def test_csv_is_a_list_of_inputs(api: Api) -> None:
    for body in (b"inputs\na\nb\n", b"id,inputs\r\n1,a\r\n2,b\r\n", b'\xef\xbb\xbf"inputs","id"\n"a",1\n"b",2'):
        api.pool.workers[0].calls.clear()
        assert [len(found) for found in send(api, "text/csv", body).json] == [1, 1]
        assert sorted(call.prompt or "" for call in api.pool.workers[0].calls) == ["a", "b"]


@pytest.mark.parametrize(
    ("media_type", "body", "message"),
    [
        (LINES, b'{"inputs":"a"}\n{"inputs":1}', "Line 2: inputs must be"),
        (LINES, b'{"inputs":"a"}\n\n[]', "Line 3: The body must be a JSON object"),
        (LINES, b'{"prompt":"a"}\n{"prompt":"a","n":0}', "Line 2: n must be"),
        (LINES, b'{"prompt":"a","stream":true}', "Line 1: stream must be false"),
        (LINES, b"\n", "1 to 128 lines"),
        (LINES, b'{"input":"a"}\n' * 129, "1 to 128 lines"),
        *(("text/csv", body, "a header that has a column inputs") for body in (b"inputs\n", b"a\nb\n", b"text\na\n")),
        ("text/csv", b"id,inputs\n1,a\n2\n3,c\n", "Row 3 of the CSV body has no column inputs"),
        ("text/csv", b"inputs\n" + b"x" * 200_000, "field larger than field limit"),
    ],
)
def test_a_wrong_line_or_row_is_named_and_none_is_left_out(
    api: Api, media_type: str, body: bytes, message: str
) -> None:
    answer = send(api, media_type, body)
    assert answer.status_code in {400, 422}
    assert message in answer.text
    if media_type == "text/csv":
        assert (answer.status_code, answer.json["code"], api.pool.workers[0].calls) == (400, "invalid_json", [])


@pytest.mark.parametrize(
    ("media_types", "is_text"),
    [
        (("text/plain", "text/plain; charset=utf-8", "application/x-text"), True),
        (("application/json", "application/x-www-form-urlencoded", "application/unheard"), False),
    ],
)
def test_plain_text_is_an_input_unless_it_is_json_and_all_else_is_json(
    api: Api, media_types: tuple[str, ...], is_text: bool
) -> None:
    for media_type in media_types:
        assert len(send(api, media_type, b'{"input": "He"}').json["output"]) == 3
        answer = send(api, media_type, b"He saw {")
        assert answer.status_code == (200 if is_text else 400)
        assert not is_text or api.pool.workers[0].calls[-1].prompt == "He saw {"


def test_parameters_beside_input_are_named_as_ignored(api: Api) -> None:
    """That deployment's are fixed. An empty object changes nothing."""
    assert "warnings" not in api.post("/invocations", {"input": "He", "parameters": {}}).json
    for fields in ({"parameters": {"top_k": 3}}, {"max_new_tokens": 3}, {"max_length": 50, "seed": 1}):
        answer = api.post("/invocations", {"input": "He", **fields}).json
        assert len(answer["output"]) == 3
        assert all(name in str(answer["warnings"]) for name in fields)
        assert "send inputs in place of input" in answer["warnings"][0]


def test_jumpstarts_parameters_stand_beside_the_text(api: Api) -> None:
    fields = {"max_new_tokens": 9, "num_return_sequences": 2, "top_k": 50, "top_p": 0.95, "do_sample": True, "seed": 5}
    answer = api.post("/invocations", {"text_inputs": "He", **fields}).json
    assert answer == {"generated_texts": [" said 5", " said 6"]}
    assert api.pool.workers[0].calls[-1].sampling.max_new_tokens == 9
    listed = api.post("/invocations", {"text_inputs": ["a", "b"], "seed": 5}).json
    assert listed == {"generated_texts": [[" said 5"], [" said 5"]]}
    assert api.post("/invocations", {"text_inputs": 1}).status_code == 422
