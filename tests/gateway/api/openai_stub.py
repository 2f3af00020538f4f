"""A stub worker for the tests of OpenAI's API, and requests to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from falcon import testing

from shared.protocol import Accepted, GenerateRequest, Token, Top
from tests.gateway.api.conftest import Api
from tests.gateway.generation.stubs import Step, make_done

N_CTX, VOCAB_SIZE = 1024, 500  # of the stub pool's model
NAMES = {408: "token_id:408"}


def words(request: GenerateRequest) -> Iterator[Step]:
    """Completes with ` w<seed>` and further words; each is a token, as is each word or id of the prompt.

    The log-probability of token `k`, from 1, is `-k`, plus a hundredth of the seed's last digit. Two tokens, 407 and
    408, have the same text, so the second has a name. At temperature 0 the model ends the text.
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
