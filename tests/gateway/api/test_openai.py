"""`/v1/completions` and `/v1/models` in this process, over stub workers: fields, choices, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
from falcon import testing

from shared.protocol import Accepted, Done, GenerateRequest, Token, Top
from tests.gateway.api.conftest import Api
from tests.gateway.generation.stubs import Step

MakeApi = Callable[..., Api]
N_CTX, VOCAB_SIZE = 1024, 500  # of the stub pool's model


def words(request: GenerateRequest) -> Iterator[Step]:
    """Completes with ` w<seed>` and further words; each is a token, as is each word or id of the prompt.

    The log-probability of a token is minus its position, from 1, in its text; the most likely other token has half of
    it. A request of the temperature 0 ends its text itself.
    """
    ids = request.prompt_ids if request.prompt_ids is not None else list(range(len((request.prompt or "").split())))
    prompt = [f"<{id_}>" for id_ in ids] if request.prompt is None else [f"{word} " for word in request.prompt.split()]
    texts = [f" w{request.seed}", *(f" x{k}" for k in range(1, request.sampling.max_new_tokens))]
    yield Accepted()

    def top(k: int) -> list[Top]:
        return [Top(7, " top", -k / 2), Top(8, " top", -k)][: request.logprobs]

    def logprob(k: int) -> float:
        return -k - request.seed % 10 / 100

    has_logprobs = request.logprobs is not None
    if request.stream:
        for k, text in enumerate(texts, 1):
            extra = {"token_text": text, "tops": top(k)} if has_logprobs else {}
            yield Token(text=text, token_id=k, logprob=logprob(k), **extra)  # type: ignore[arg-type]
    yield Done(
        text="".join(texts),
        token_ids=list(range(1, len(texts) + 1)),
        logprobs=[logprob(k) for k in range(1, len(texts) + 1)],
        ends=list(accumulate(map(len, texts))),
        num_kept_tokens=len(texts),
        finish_reason="eos" if request.sampling.temperature == 0 else "length",
        num_prompt_tokens=len(ids),
        cached_tokens=min(request.seed % 10, len(ids)),
        queue_ms=0.5,
        prefill_ms=1.0,
        decode_ms=2.0,
        token_texts=texts if has_logprobs else None,
        tops=[top(k) for k in range(1, len(texts) + 1)] if has_logprobs else None,
        prompt_text="".join(prompt) if request.echo else None,
        prompt_ids=ids if request.echo else None,
        prompt_token_texts=prompt if request.echo else None,
        prompt_ends=list(accumulate(map(len, prompt))) if request.echo else None,
        prompt_logprobs=[None, *(-float(k) for k in range(1, len(ids)))][: len(ids)] if has_logprobs else None,
        prompt_tops=[None, *(top(k) for k in range(1, len(ids)))][: len(ids)] if has_logprobs else None,
    )


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api(words)


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
        "prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


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
    page = testing.TestClient(api.app, headers={"Host": "localhost"})
    listed = page.simulate_get("/v1/models").json
    [model] = listed["data"]
    assert (listed["object"], model["id"], model["object"], model["max_model_len"]) == ("list", "small", "model", N_CTX)
    assert isinstance(model["created"], int)
    assert page.simulate_get("/v1/models/small").json == model
    missing = page.simulate_get("/v1/models/gpt-4")
    assert (missing.status_code, missing.json["error"]["code"]) == (404, "model_not_found")
    assert "small" in missing.json["error"]["message"]
