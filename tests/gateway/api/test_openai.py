"""`/v1/completions` and `/v1/models` in this process: prompts, choices, streams, and errors in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from falcon import testing

from shared.api_keys import new_key
from shared.protocol import Accepted, GenerateRequest, Token, Top
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.conftest import MakeGateway
from tests.gateway.generation.stubs import Refusal, Step, completion, make_done

N_CTX = 1024  # of the stub pool's model
NAMES = {408: "token_id:408", 3: "bytes:\\xa9"}


def words(request: GenerateRequest) -> Iterator[Step]:
    """Completes with ` w<seed>` and further words; each is a token, as is each word or id of the prompt.

    The log-probability of token `k`, from 1, is `-k`, plus a hundredth of the seed's last digit. Two tokens, 407 and
    408, have the same text, so the second has a name, and token 3 is a part of a character. At temperature 0 the model
    ends the text.
    """
    ids = request.prompt_ids if request.prompt_ids is not None else list(range(len((request.prompt or "").split())))
    prompt = [f"<{id_}>" for id_ in ids] if request.prompt is None else [f"{word} " for word in request.prompt.split()]
    texts = [f" w{request.seed}", *(f" x{k}" for k in range(1, 99))][: request.sampling.max_new_tokens]
    begins = list(accumulate(map(len, texts), initial=0))
    yield Accepted()

    def top(k: int) -> list[Top]:
        return [Top(407, " top", -k / 2), Top(408, " top", -k)][: request.logprobs]

    def logprob(k: int) -> float:
        return -k + request.seed % 10 / 100

    has_logprobs = request.logprobs is not None
    if request.stream:
        for k, text in enumerate(texts, 1):
            extra = {"token_text": text, "begin": begins[k - 1], "tops": top(k), "names": NAMES} if has_logprobs else {}
            yield Token(text=text, token_id=k, logprob=logprob(k), **extra)  # type: ignore[arg-type]
    yield make_done(
        texts,
        token_ids=list(range(1, len(texts) + 1)),
        logprobs=[logprob(k) for k in range(1, len(texts) + 1)],
        finish_reason="eos" if texts and request.sampling.temperature == 0 else "length",
        num_prompt_tokens=len(ids),
        cached_tokens=min(request.seed % 10, len(ids)),
        token_texts=texts if has_logprobs else None,
        tops=[top(k) for k in range(1, len(texts) + 1)] if has_logprobs else None,
        prompt_text="".join(prompt) if request.echo else None,
        prompt_ids=ids if request.echo else None,
        prompt_token_texts=prompt if request.echo else None,
        prompt_ends=list(accumulate(map(len, prompt))) if request.echo else None,
        prompt_logprobs=[None, *(-float(k) for k in range(1, len(ids)))][: len(ids)] if has_logprobs else None,
        prompt_tops=[None, *(top(k) for k in range(1, len(ids)))][: len(ids)] if has_logprobs else None,
        names=NAMES if has_logprobs else None,
    )


def post(api: Api, **fields: Any) -> testing.Result:
    """A prompt, a seed and few tokens are filled in."""
    return api.post("/v1/completions", {"prompt": "He saw ", "seed": 40, "max_tokens": 2, **fields})


def complete(api: Api, **fields: Any) -> dict[str, Any]:
    response = post(api, **fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json
    return answer


def refuse(api: Api, status: int = 400, **fields: Any) -> dict[str, Any]:
    """The error of a refused request."""
    response = post(api, **fields)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    error: dict[str, Any] = response.json["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def chunks_of(response: testing.Result) -> list[dict[str, Any]]:
    """The chunks of a stream that ends properly."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, their parts put together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] not in choices:
                choices[part["index"]] = part
                continue
            whole = choices[part["index"]]
            assert whole["finish_reason"] is None, "a part after the last"
            whole["text"] += part["text"]
            whole["finish_reason"] = part["finish_reason"]
            for name, items in (part["logprobs"] or {}).items():
                whole["logprobs"][name] += items
    return [choices[index] for index in sorted(choices)]


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
        *(("a", ["a"]), (["a", "b"], ["a", "b"]), ("", [""]), ([""], [""])),
        *(([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]]), ([[]], [[]])),
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
    fields = {"prompt": ["a", "b b", "c c c"], "n": 2, "echo": True, "max_tokens": 1}
    answer = complete(api, **fields)
    texts = [f"{prompt} w{seed}" for prompt in ("a", "b b", "c c c") for seed in (40, 41)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1 + 2 + 3, 6)
    assert joined(chunks_of(post(api, **fields, stream=True))) == answer["choices"]


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


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"echo": True}, {"n": 2}, {"n": 2, "stream": True}])
def test_a_token_whose_text_is_not_its_alone_is_reported_by_its_name(api: Api, fields: dict[str, Any]) -> None:
    """A part of a character by its bytes: of the prompt, of the completion, and among the likeliest."""
    response = post(api, prompt=[[1, 3, 22]], max_tokens=3, logprobs=2, **fields)
    choices = joined(chunks_of(response)) if "stream" in fields else response.json["choices"]
    assert len(choices) == fields.get("n", 1)
    for choice in choices:
        scores = choice["logprobs"]
        assert scores["tokens"][-2:] == [" x1", "bytes:\\xa9"]
        assert scores["tokens"][:-3] == (["<1>", "bytes:\\xa9", "<22>"] if "echo" in fields else [])
        assert scores["top_logprobs"][-1].keys() == {" top", "token_id:408", "bytes:\\xa9"}
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


# Fields ------------------------------------------------------------------------------------------


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


def test_what_is_not_served_is_an_error_that_says_what_is(api: Api) -> None:
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/files")):
        response = api.request(method, path, body=b"{}")
        assert (response.status_code, response.json["error"]["code"]) == (404, "not_found")
        assert "POST /v1/completions" in response.json["error"]["message"]
    for method, path in (("GET", "/v1/completions"), ("POST", "/v1/models")):
        response = api.request(method, path, body=b"{}")
        assert (response.status_code, response.json["error"]["code"]) == (405, "method_not_allowed")


def test_errors_of_keys_have_openais_types_and_codes(make_gateway: MakeGateway, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "first", rate=2)[0]
    client = make_gateway(keys=str(tmp_path / "keys")).client
    answers = [
        client.simulate_get(path, headers={"Authorization": f"Bearer {sent}"})
        for sent, path in (("wrong", "/v1/models"), (key, "/v1/models"), (key, "/v1/files"), (key, "/v1/models"))
    ]
    assert [answer.status_code for answer in answers] == [401, 200, 404, 429]
    assert [model["id"] for model in answers[1].json["data"]] == ["small", "medium"]
    refused, limited = answers[0].json["error"], answers[3].json["error"]
    assert (refused["type"], refused["code"]) == ("authentication_error", "invalid_api_key")
    assert (limited["type"], limited["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert int(answers[3].headers["retry-after"]) >= 1
