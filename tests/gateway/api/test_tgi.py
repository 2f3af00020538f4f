"""Text Generation Inference's routes: what a request becomes, and how answers, streams and errors look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from falcon import testing

from gateway.api.tgi_schema import EMPTY_BODY, NO_INPUTS
from shared.protocol import Accepted, GenerateRequest, Token, TokenizeResponse, Top
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.generation.stubs import Respond, Step, completion, make_done

PATHS = ("/generate", "/generate_stream", "/")


def respond(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, f" the sea {request.seed}", finish_reason="length", logprob=-1.0 - request.seed)


def tokens_then(*texts: tuple[str, str], text: str, finish_reason: str) -> Respond:
    """A worker that streams tokens, given as (delta, own text)."""

    def answer(request: GenerateRequest) -> Iterator[Step]:
        yield Accepted()
        for number, (delta, own) in enumerate(texts):
            tops = [Top(number, own, -1.0)][: request.logprobs]
            yield Token(text=delta, token_id=number, logprob=-1.0, token_text=own, begin=2 * number, tops=tops)
        yield make_done(
            [own for _, own in texts],
            text=text,
            ends=[min(len(text), 2 * number + 2) for number in range(len(texts))],
            finish_reason=finish_reason,
            token_texts=[own for _, own in texts],
            tops=[[] for _ in texts],
        )

    return answer


def tokenize(text: str) -> TokenizeResponse:
    if not text:
        return TokenizeResponse(ids=[], texts=[], ends=[], n_ctx=1024, eos_id=0)
    return TokenizeResponse(ids=[7, 8], texts=["a", " b"], ends=[1, len(text)], n_ctx=1024, eos_id=0)


def generate(api: Api, path: str = "/generate", **parameters: Any) -> testing.Result:
    return api.post(path, {"inputs": "He saw", "parameters": parameters})


def events(result: testing.Result) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data:")) for line in result.text.splitlines() if line]


def test_requests_of_each_form_become_the_protocols(make_api: MakeApi) -> None:
    """Both lists of stop sequences count; `truncate` is the end of the input."""
    api = make_api(respond)
    for body in ({"inputs": "He saw"}, {"inputs": "He saw", "parameters": None, "stream": None}):
        assert api.post("/generate", body).status_code == 200
    assert generate(api, stop=["a", "b"], stop_sequences=["b", "c"], truncate=9).status_code == 200
    assert [call.max_prompt_tokens for call in api.pool.workers[0].calls] == [None, None, 9]
    assert [call.sampling.stop for call in api.pool.workers[0].calls] == [(), (), ("a", "b", "c")]


def test_generate_answers_an_object_and_the_root_a_list(make_api: MakeApi) -> None:
    api = make_api(respond)
    assert generate(api, seed=1).json == {"generated_text": " the sea 1"}
    assert generate(api, "/", seed=1, return_full_text=True).json == [{"generated_text": "He saw the sea 1"}]
    assert api.post("/", {"inputs": "He saw", "stream": True}).headers["content-type"] == "text/event-stream"


def test_details_describe_every_token(make_api: MakeApi) -> None:
    api = make_api(respond)
    details = generate(api, details=True, top_n_tokens=1, do_sample=True, seed=3).json["details"]
    assert details.pop("tokens") == [
        {"id": 0, "text": " the", "logprob": -4.0, "special": False},
        {"id": 1, "text": " sea", "logprob": -4.0, "special": False},
        {"id": 2, "text": " 3", "logprob": -4.0, "special": False},
    ]
    assert [[token["text"] for token in tops] for tops in details.pop("top_tokens")] == [[" the"], [" sea"], [" 3"]]
    assert details == {"finish_reason": "length", "generated_tokens": 3, "seed": 3, "prefill": []}
    assert generate(api, details=True).json["details"]["seed"] is None  # greedy


def test_best_of_answers_with_the_likeliest(make_api: MakeApi) -> None:
    api = make_api(respond)
    answer = generate(api, best_of=3, do_sample=True, seed=5, details=True).json
    assert answer["generated_text"] == " the sea 5"
    others = answer["details"]["best_of_sequences"]
    assert [(other["generated_text"], other["seed"]) for other in others] == [(" the sea 6", 6), (" the sea 7", 7)]


def test_a_stream_has_an_event_per_token_and_the_text_in_the_last(make_api: MakeApi) -> None:
    worker = tokens_then((" a", " a"), (" b", " b"), (" c", " c"), text=" a b c", finish_reason="length")
    *first, last = events(
        generate(make_api(worker), "/generate_stream", max_new_tokens=3, details=True, top_n_tokens=1)
    )
    assert [event["token"] for event in [*first, last]] == [
        {"id": number, "text": text, "logprob": -1.0, "special": False}
        for number, text in enumerate([" a", " b", " c"])
    ]
    assert all(event["generated_text"] is None and event["details"] is None for event in first)
    assert first[0]["top_tokens"] == [{"id": 0, "text": " a", "logprob": -1.0, "special": False}]
    assert last["generated_text"] == " a b c"
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 4}


@pytest.mark.parametrize(
    ("tokens", "text", "finish_reason", "texts", "is_special"),
    [
        # The end of the text has no text; what was held back, as it could have become a stop string, comes with it.
        ([(" a", " a"), ("", "<|endoftext|>")], " a", "eos", [" a", ""], True),
        ([(" a", " a"), ("", " b")], " a", "stop", [" a", ""], False),
        ([(" a", " a"), (" b", " bX")], " a b", "stop", [" a", " b"], False),
        ([(" a", " a"), ("", " b")], " a b", "length", [" a", " b"], False),
        ([("", " b"), (" b c", " c"), (" d", " d")], " b c d", "length", ["", " b c", " d"], False),
        # The time limit ends the text after a token that was sent.
        ([(" a", " a"), (" b", " b")], " a b", "deadline", [" a", " b", ""], True),
    ],
)
def test_a_streams_tokens_are_the_text(
    make_api: MakeApi, tokens: list[tuple[str, str]], text: str, finish_reason: str, texts: list[str], is_special: bool
) -> None:
    api = make_api(tokens_then(*tokens, text=text, finish_reason=finish_reason))
    limit = {"max_new_tokens": len(tokens)} if finish_reason == "length" else {}
    found = events(generate(api, "/generate_stream", **limit))
    assert [event["token"]["text"] for event in found] == texts
    assert [event["generated_text"] for event in found] == [None] * (len(texts) - 1) + [text]
    assert found[-1]["token"]["special"] is is_special


@pytest.mark.parametrize("path", PATHS)
def test_a_body_without_inputs_has_the_published_text(make_api: MakeApi, path: str) -> None:
    api = make_api(respond)
    bodies = {
        b"": EMPTY_BODY,
        b" \n": EMPTY_BODY,
        b"{}": NO_INPUTS,
        b'{"input": "x"}': NO_INPUTS,
        b'{"inputs": ""}': NO_INPUTS,
        b'{"inputs": null}': NO_INPUTS,
    }
    for body, text in bodies.items():
        answer = api.request("POST", path, body=body, headers={"Content-Length": str(len(body))})
        assert answer.status_code == 400
        assert answer.json == {"error": text, "error_type": "validation"}


def test_info_and_endpoint(make_api: MakeApi) -> None:
    api = make_api(respond)
    info = api.request("GET", "/info").json
    assert (info["model_id"], info["max_total_tokens"], info["max_stop_sequences"]) == ("small", 1024, 4)
    endpoint = api.request("GET", "/endpoint", headers={"Host": "localhost:81"})
    assert endpoint.text == "http://localhost:81"
    assert endpoint.headers["content-type"].startswith("text/plain")


def test_tokenize_answers_each_dialect_in_its_shape(make_api: MakeApi) -> None:
    api = make_api(respond, tokenize=tokenize)
    assert api.post("/tokenize", {"inputs": "a b"}).json == [
        {"id": 7, "text": "a", "start": 0, "stop": 1},
        {"id": 8, "text": " b", "start": 1, "stop": 3},
    ]
    answer = api.post("/tokenize", {"prompt": "a b", "add_special_tokens": False, "model": "x"}).json
    assert answer == {"count": 2, "max_model_len": 1024, "tokens": [7, 8], "token_strs": None}
    assert api.post("/tokenize", {"inputs": ""}).json == []
    strings = api.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json["token_strs"]
    assert strings == ["a", " b"]
    for body, name in (({}, "inputs"), ({"prompt": 1}, "prompt"), ({"inputs": 1}, "inputs")):
        answer = api.post("/tokenize", body)
        assert answer.status_code == 422
        assert answer.json["error"].startswith(f"{name} ")


def test_tokenizer_info_names_the_special_tokens(make_api: MakeApi) -> None:
    info = make_api(respond, tokenize=tokenize).request("GET", "/tokenizer_info").json
    assert (info["eos_token"], info["eos_token_id"], info["model_max_length"]) == ("<|endoftext|>", 0, 1024)
