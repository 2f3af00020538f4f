"""Text Generation Inference's routes: what a request becomes, and how answers, streams and errors look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from falcon import testing

from gateway.api.tgi_schema import EMPTY_BODY, NO_INPUTS
from shared.protocol import Accepted, GenerateRequest, Sampling, Token, TokenizeResponse, Top
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.generation.stubs import Refusal, Respond, Step, completion, make_done

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


BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("best_of", [0, 1, 8], [-1, 9, 1.5, "2"]),
    ("num_return_sequences", [1, 8, None], [0, -1, 9]),
    ("temperature", [0, 0.001, 1, 100], [-1, 100.1, "1"]),
    ("repetition_penalty", [0.01, 1.0, 100], [0, 0.009, 100.1]),
    ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1]),
    ("top_k", [0, -1, 1, 500, 100_000], [-2, 0.5]),
    ("top_p", [0, 0.001, 1], [-0.1, 1.001]),
    ("do_sample", [True, False, None], [1, "true"]),
    ("max_new_tokens", [1, 1023, 1024, -1, 10**300], [0, -2]),
    ("max_length", [1, 50, 10**300, 0, -1], [-2, 1.5]),
    ("max_time", [0, 0.5, 31], [-1, "1"]),
    ("return_full_text", [True, False, None], ["no"]),
    ("stop", [[], ["a"], ["a", "b", "c", "d"], ["x" * 256], [""], "", "a"], [["a"] * 5, ["x" * 257], 1, [1]]),
    ("stop_sequences", [[], ["a", "b", "c", "d"], [""]], [["a"] * 5]),
    ("seed", [-1, 0, 2**63 - 1, 2**64 - 1, "null"], [0.5, "1"]),
    ("truncate", [0, -1, 1, 1023, 1024, "null"], [-2, "1"]),
    ("details", [True, False, None], [0]),
    ("decoder_input_details", [False, None], ["x"]),
    ("top_n_tokens", [0, 5, None], [-1, 6]),
    ("typical_p", [None, 1, 0.95, "null"], [0, -0.1, 1.1, "1"]),
    ("watermark", [False, None, True], []),
    ("grammar", [None, ""], [{"type": "regex", "value": "a"}, {}]),
    ("adapter_id", [None, "", "null"], ["x"]),
    ("clean", [True, False, None], ["x"]),
]


@pytest.mark.parametrize(("name", "within", "beyond"), BOUNDS, ids=[name for name, _, _ in BOUNDS])
def test_each_parameter_has_its_range(make_api: MakeApi, name: str, within: list[Any], beyond: list[Any]) -> None:
    api = make_api(respond, max_batch=8, tokenize=tokenize)
    sampled: dict[str, Any] = {"do_sample": True} if name == "best_of" else {}
    for value in within:
        answer = generate(api, **(sampled | {name: value}))
        assert answer.status_code == 200, (value, answer.text)
    for value in beyond:
        answer = generate(api, **(sampled | {name: value}))
        assert answer.status_code == 422, (value, answer.text)
        assert answer.json["error_type"] == "validation"
        assert name in answer.json["error"]


def test_parameters_become_the_protocols(make_api: MakeApi) -> None:
    api = make_api(respond)
    stop: dict[str, Any] = {"stop": ["a", "b"], "stop_sequences": ["b", "c"]}
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": -1}
    assert generate(api, **stop, **penalties, max_new_tokens=5, truncate=9, seed=4).status_code == 200
    [call] = api.pool.workers[0].calls
    expected = Sampling(max_new_tokens=5, temperature=0, top_k=0, top_p=1, stop=("a", "b", "c"), **penalties)
    assert call.sampling == expected
    assert (call.prompt, call.seed, call.max_prompt_tokens, call.heal) == ("He saw", 4, 9, False)


def test_null_parameters_and_no_parameters_are_the_defaults(make_api: MakeApi) -> None:
    api = make_api(respond)
    for body in ({"inputs": "He saw"}, {"inputs": "He saw", "parameters": None, "stream": None}):
        assert api.post("/generate", body).status_code == 200
    first, second = api.pool.workers[0].calls
    assert first.sampling == second.sampling
    assert first.max_prompt_tokens is None


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


def test_greedy_decoding_has_no_seed(make_api: MakeApi) -> None:
    assert generate(make_api(respond), details=True).json["details"]["seed"] is None


def test_best_of_answers_with_the_likeliest(make_api: MakeApi) -> None:
    api = make_api(respond)
    answer = generate(api, best_of=3, do_sample=True, seed=5, details=True).json
    assert answer["generated_text"] == " the sea 5"
    others = answer["details"]["best_of_sequences"]
    assert [(other["generated_text"], other["seed"]) for other in others] == [(" the sea 6", 6), (" the sea 7", 7)]


def test_parameters_that_exclude_each_other_are_refused(make_api: MakeApi) -> None:
    api = make_api(respond)
    refused: list[tuple[str, str, dict[str, Any]]] = [
        ("/generate", "stop", {"stop": ["a", "b", "c"], "stop_sequences": ["d", "e"]}),
        ("/generate_stream", "best_of", {"best_of": 2, "do_sample": True}),
        ("/generate_stream", "num_return_sequences", {"num_return_sequences": 2}),
        ("/generate_stream", "decoder_input_details", {"decoder_input_details": True}),
        ("/generate_stream", "clean", {"clean": True}),
    ]
    for path, name, parameters in refused:
        answer = generate(api, path, **parameters)
        assert (answer.status_code, answer.json["error_type"]) == (422, "validation")
        assert answer.json["error"].startswith(name)
    assert not api.pool.workers[0].calls


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


@pytest.mark.parametrize("path", PATHS)
def test_errors_have_the_dialects_shape(make_api: MakeApi, path: str) -> None:
    api = make_api(respond, settings={"max_body_bytes": "1024"})

    def error(status: int, **request: Any) -> tuple[str, str | None]:
        answer = api.request("POST", path, **request)
        assert answer.status_code == status
        return answer.json["error"], answer.json["error_type"]

    assert error(400, body=b"[1]")[1] == "validation"
    assert error(413, body=b" " * 1025)[1] == "validation"
    assert error(403, body=b"{}", headers={"Origin": "https://evil.example"})[1] is None
    refused, kind = error(422, json={"inputs": "a", "parameters": {"grammar": {"type": "json", "value": {}}}})
    assert refused.startswith("parameters.grammar is not supported, and without it the text would be wrong")
    assert kind == "validation"
    assert error(422, json={"inputs": 3})[0].startswith("inputs must be a string")


@pytest.mark.parametrize("path", PATHS)
def test_a_failed_branch_is_an_error_with_a_status(make_api: MakeApi, path: str) -> None:
    cases = [
        (Refusal(422, "prompt_too_long"), 422, "validation"),
        (Refusal(422, "invalid_request"), 422, "validation"),
        (Refusal(500, "device"), 424, "generation"),
    ]
    refusals = [refusal for refusal, _, _ in cases]
    api = make_api(lambda request: [refusals[request.seed]])
    for seed, (_, status, kind) in enumerate(cases):
        answer = generate(api, path, seed=seed)
        assert (answer.status_code, answer.json["error_type"]) == (status, kind)


def test_a_full_queue_is_a_429_with_retry_after(make_api: MakeApi) -> None:
    api = make_api(respond, queue=0)
    for _ in range(3):
        api.pool.admission.reserve("small", 1, 1e12)
    answer = generate(api)
    assert (answer.status_code, answer.json["error_type"]) == (429, "overloaded")
    assert int(answer.headers["Retry-After"]) >= 1


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


def test_tokens_come_from_the_next_slot_if_one_fails(make_api: MakeApi) -> None:
    api = make_api(respond, respond, tokenize=tokenize)
    api.pool.workers[0].close()
    assert api.post("/tokenize", {"prompt": "a b"}).json["tokens"] == [7, 8]
    api.pool.workers[1].close()
    answer = api.post("/tokenize", {"prompt": "a b"})
    assert (answer.status_code, answer.json["error_type"]) == (503, "overloaded")
