"""`/v1/completions` and `/v1/models` in this process, over stub workers: prompts, choices and streams."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest

from shared.protocol import Accepted, GenerateRequest, Token, Top
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.api.openai_stub import N_CTX, chunks_of, complete, joined, post, refuse, words
from tests.gateway.generation.stubs import Step, completion, make_done


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api(words)


def test_an_answer_has_the_shape_and_the_defaults_of_openai(api: Api) -> None:
    response = api.post("/v1/completions", {"prompt": "He saw "}, headers={"X-Request-Id": "mine"})
    answer = response.json
    assert answer["id"] == "cmpl-mine"
    assert (answer["object"], answer["model"]) == ("text_completion", "small")
    assert isinstance(answer["created"], int)
    [choice] = answer["choices"]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")
    assert answer["usage"]["completion_tokens"] == 16
    assert "warnings" not in answer
    [call] = api.pool.workers[0].calls
    assert (call.prompt, call.heal, call.echo, call.logprobs, call.stream) == ("He saw ", False, False, None, False)
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, 0, ())
    assert call.max_prompt_tokens == N_CTX - 16


def test_choices_are_the_branches_in_their_order(api: Api) -> None:
    answer = complete(api, n=3, best_of=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == [" w40 x1", " w41 x1", " w42 x1"]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"n": 3, "logprobs": 0}, {"echo": True}, {"temperature": 0}])
def test_a_stream_is_the_answer_in_parts(api: Api, fields: dict[str, Any]) -> None:
    whole = complete(api, **fields)
    chunks = chunks_of(post(api, **fields, stream=True))
    assert joined(chunks) == whole["choices"]
    assert len(chunks) >= 2 * fields.get("n", 1)
    for chunk in chunks:
        assert chunk.keys() == {"id", "object", "created", "model", "choices"}
        assert chunk["id"] == chunks[0]["id"]
        assert len(chunk["choices"]) == 1


def test_models(api: Api) -> None:
    listed = api.request("GET", "/v1/models").json
    [model] = listed["data"]
    assert (listed["object"], model["id"], model["object"], model["max_model_len"]) == ("list", "small", "model", N_CTX)
    assert isinstance(model["created"], int)
    assert api.request("GET", "/v1/models/small").json == model
    missing = api.request("GET", "/v1/models/gpt-4")
    assert (missing.status_code, missing.json["error"]["code"]) == (404, "model_not_found")
    assert "small" in missing.json["error"]["message"]


# Prompts -----------------------------------------------------------------------------------------


def test_prompts_of_every_form_reach_the_worker(api: Api) -> None:
    forms: list[tuple[Any, list[Any]]] = [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
        ([""], [""]),
        ([[]], [[]]),
    ]
    for prompt, expected in forms:
        api.pool.workers[0].calls.clear()
        answer = complete(api, prompt=prompt)
        calls = api.pool.workers[0].calls
        sent = [call.prompt if call.prompt_ids is None else call.prompt_ids for call in calls]
        assert sorted(sent, key=str) == sorted(expected, key=str)
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert api.post("/v1/completions", {"max_tokens": 1}).status_code == 200


def test_choices_come_prompt_by_prompt_with_the_same_seeds_for_each(api: Api) -> None:
    answer = complete(api, prompt=["a", "b b", "c c c"], n=2, echo=True, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == [
        "a w40",
        "a w41",
        "b b w40",
        "b b w41",
        "c c c w40",
        "c c c w41",
    ]
    assert answer["usage"]["prompt_tokens"] == 1 + 2 + 3
    assert answer["usage"]["completion_tokens"] == 6
    assert (
        joined(chunks_of(post(api, prompt=["a", "b b", "c c c"], n=2, echo=True, max_tokens=1, stream=True)))
        == (answer["choices"])
    )


def test_a_long_text_loses_its_beginning_unless_it_is_echoed(api: Api) -> None:
    complete(api)
    complete(api, echo=True)
    complete(api, prompt=[1])
    assert [call.max_prompt_tokens for call in api.pool.workers[0].calls] == [N_CTX - 2, None, None]


def test_token_ids_that_do_not_fit_are_refused(api: Api) -> None:
    for length, max_tokens in [(N_CTX, 1), (N_CTX + 1, 0), (N_CTX - 1, 2)]:
        error = refuse(api, prompt=[[1], [1] * length], max_tokens=max_tokens)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"{length} tokens" in error["message"]
        assert f"max_tokens is {max_tokens}: together more than {N_CTX}" in error["message"]


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 0}, {"echo": True, "logprobs": 20, "n": 3}, {}])
def test_prompts_that_fill_the_context_are_scored_without_new_tokens(api: Api, fields: dict[str, Any]) -> None:
    answer = complete(api, prompt=[[1] * N_CTX, [2] * N_CTX], max_tokens=0, **fields)
    assert answer["usage"]["completion_tokens"] == 0
    num_choices = 2 * fields.get("n", 1)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * num_choices
    assert all(call.sampling.max_new_tokens == 0 for call in api.pool.workers[0].calls)
    for choice in answer["choices"]:
        if "logprobs" in fields:
            assert {len(items) for items in choice["logprobs"].values()} == {N_CTX}
        else:
            assert choice["text"] == ""


# Log-probabilities, echo, best_of, clean -----------------------------------------------------------


def test_log_probabilities_of_generated_tokens(api: Api) -> None:
    [choice] = complete(api, logprobs=1)["choices"]
    assert choice["logprobs"] == {
        "tokens": [" w40", " x1"],
        "token_logprobs": [-1, -2],
        "top_logprobs": [{" top": -0.5, " w40": -1}, {" top": -1, " x1": -2}],
        "text_offset": [0, 4],
    }
    [choice] = complete(api, logprobs=0)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{" w40": -1}, {" x1": -2}]


def test_tokens_with_the_same_text_are_all_reported(api: Api) -> None:
    [choice] = complete(api, logprobs=2)["choices"]
    assert choice["logprobs"]["top_logprobs"][1] == {" top": -1, "token_id:408": -2, " x1": -2}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"echo": True}, {"n": 2}, {"n": 2, "stream": True}])
def test_a_part_of_a_character_is_reported_by_its_bytes(make_api: MakeApi, fields: dict[str, Any]) -> None:
    """The likelier first byte of "è" is another token, whose text is U+FFFD, too."""
    tops = [[Top(3, "\ufffd", -0.5), Top(2, "\ufffd", -3.0)], [Top(4, "\ufffd", -0.1)]]
    names = {2: "bytes:\\xc3", 3: "bytes:\\xe2\\x80", 4: "bytes:\\xa9"}

    def respond(request: GenerateRequest) -> Iterator[Step]:
        yield Accepted()
        if request.stream:
            for text, id_, logprob, top in [("", 2, -3.0, tops[0]), ("é", 4, -0.1, tops[1])]:
                yield Token(
                    text=text, token_id=id_, logprob=logprob, token_text="\ufffd", begin=0, tops=top, names=names
                )
        echo = {
            "prompt_text": "é",
            "num_prompt_tokens": 2,
            "prompt_ids": [2, 4],
            "prompt_token_texts": ["\ufffd"] * 2,
            "prompt_ends": [0, 1],
            "prompt_logprobs": [None, -0.1],
            "prompt_tops": [None, tops[1]],
        }
        yield make_done(
            ["", "é"],
            token_ids=[2, 4],
            logprobs=[-3.0, -0.1],
            token_texts=["\ufffd"] * 2,
            tops=tops,
            names=names,
            **(echo if request.echo else {}),
        )

    response = post(make_api(respond), prompt="é", logprobs=2, **fields)
    choices = joined(chunks_of(response)) if "stream" in fields else response.json["choices"]
    assert len(choices) == fields.get("n", 1)
    num_prompt = 2 if "echo" in fields else 0
    for choice in choices:
        scores = choice["logprobs"]
        assert scores["tokens"][num_prompt:] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert scores["tokens"][:num_prompt] == ["bytes:\\xc3", "bytes:\\xa9"][:num_prompt]
        assert scores["text_offset"] == [0, 0, 1, 1][: num_prompt + 2] if num_prompt else [0, 0]
        assert scores["top_logprobs"][num_prompt:] == [
            {"bytes:\\xe2\\x80": -0.5, "bytes:\\xc3": -3},
            {"bytes:\\xa9": -0.1},
        ]
        for name, logprob, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
            assert top is None or top[name] == logprob


@pytest.mark.parametrize("is_text", [True, False])
def test_log_probabilities_of_an_echoed_prompt(api: Api, is_text: bool) -> None:
    """As evaluation harnesses read them: a value for each prompt token, and for exactly one more."""
    fields = {"prompt": "a bb ccc " if is_text else [[1, 22, 333]], "echo": True, "logprobs": 1, "max_tokens": 1}
    tokens = ["a ", "bb ", "ccc "] if is_text else ["<1>", "<22>", "<333>"]
    answer = complete(api, **fields)
    [choice] = answer["choices"]
    assert choice["text"] == "".join(tokens) + " w40"
    assert choice["logprobs"]["tokens"] == [*tokens, " w40"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1, -2, -1]
    assert choice["logprobs"]["top_logprobs"] == [
        None,
        {" top": -0.5, tokens[1]: -1},
        {" top": -1, tokens[2]: -2},
        {" top": -0.5, " w40": -1},
    ]
    assert choice["logprobs"]["text_offset"] == [0, *accumulate(map(len, tokens))]
    [whole] = chunks_of(post(api, **fields, stream=True))
    assert whole["choices"] == answer["choices"]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stream": True}])
def test_no_tokens_with_echo_are_the_prompt_alone(api: Api, fields: dict[str, Any]) -> None:
    response = post(api, prompt="a b ", max_tokens=0, echo=True, temperature=0, **fields)
    answer = chunks_of(response)[0] if "stream" in fields else response.json
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a b ", "length")
    if "logprobs" in fields:
        assert choice["logprobs"]["token_logprobs"] == [None, -1]
        assert len({len(items) for items in choice["logprobs"].values()}) == 1
    if "stream" not in fields:
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2, 0)


def test_best_of_gives_the_likeliest_first(api: Api) -> None:
    answer = complete(api, prompt=["a", "b"], n=2, best_of=4)
    assert [choice["text"] for choice in answer["choices"]] == [" w43 x1", " w42 x1"] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 2


def test_choices_are_what_the_model_said_unless_the_request_asks_for_clean_ones(make_api: MakeApi) -> None:
    texts = [" the sea and", " the sea and", " a boat came near the"]

    def respond(request: GenerateRequest) -> Iterator[Step]:
        logprob = -1.0 if request.seed % 10 == 2 else -2.0
        yield from completion(request, texts[request.seed % 10 % 3], logprob=logprob, finish_reason="length")

    api = make_api(respond)
    assert [choice["text"] for choice in complete(api, n=3, max_tokens=5)["choices"]] == texts
    assert not any(call.heal for call in api.pool.workers[0].calls)
    cleaned = complete(api, n=3, max_tokens=5, clean=True, temperature=0)
    distinct = [" a boat came near", " the sea"]  # each without its last word, which may be a part of one
    assert [(choice["index"], choice["text"]) for choice in cleaned["choices"]] == list(enumerate(distinct))
    calls = api.pool.workers[0].calls[3:]
    assert all(call.heal for call in calls)
    assert sorted(call.sampling.first_rank for call in calls)[:3] == [0, 1, 2]
    streamed = joined(chunks_of(post(api, n=3, max_tokens=5, clean=True, temperature=0, stream=True)))
    assert [choice["text"] for choice in streamed] == distinct[::-1]
    assert all(choice["finish_reason"] for choice in streamed)


# Streams -----------------------------------------------------------------------------------------


def test_usage_comes_in_a_last_chunk_without_choices(api: Api) -> None:
    *chunks, last = chunks_of(post(api, n=2, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == complete(api, n=2)["usage"]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
