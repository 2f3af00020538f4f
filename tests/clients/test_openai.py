"""The openai SDK, unmodified, against the real pools: answers, exceptions and retries."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from openai import OpenAI
from openai.types import Completion

from shared.api_keys import new_key
from tests.e2e.harness import Tercet, running, until
from workers.checkpoints.resolve import EMBEDDED
from workers.text.tokenizer import Tokenizer

PROMPT = "The old man looked at the sea and"
TOKENIZER = Tokenizer.from_directory(EMBEDDED, 8192)


@pytest.fixture(scope="package")
def client(tercet: Tercet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tercet.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """An instance that requires a key, has no queue and computes one sequence at a time."""
    base = tmp_path_factory.mktemp("t")
    key, _ = new_key(base / "keys", "tests")
    with running(base, keys=str(base / "keys"), api_key=key, key_rate="0", max_batch="1", queue="0") as instance:
        yield instance


def client_of(tercet: Tercet) -> OpenAI:
    return OpenAI(base_url=f"{tercet.url}/v1", api_key=tercet.environ["TERCET_API_KEY"])


def texts(completion: Completion) -> list[str]:
    assert [choice.index for choice in completion.choices] == list(range(len(completion.choices)))
    return [choice.text for choice in completion.choices]


def test_three_choices_of_one_prompt(client: OpenAI) -> None:
    completion = client.completions.create(model="embedded", prompt=PROMPT, n=3, max_tokens=12, seed=5)
    assert len(set(texts(completion))) == 3
    assert {choice.finish_reason for choice in completion.choices} <= {"length", "stop"}
    assert completion.model == "embedded"
    assert completion.usage is not None
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion.usage.completion_tokens <= 36
    assert texts(client.completions.create(model="embedded", prompt=PROMPT, n=3, max_tokens=12, seed=5)) == texts(
        completion
    )


def test_default_is_one_choice_of_sixteen_tokens(client: OpenAI) -> None:
    completion = client.completions.create(model="embedded", prompt=PROMPT, temperature=0)
    assert completion.usage is not None
    assert (len(completion.choices), completion.usage.completion_tokens) == (1, 16)


def test_a_stream_holds_what_the_answer_holds(client: OpenAI) -> None:
    completion = client.completions.create(model="embedded", prompt=PROMPT, n=2, max_tokens=12, seed=5)
    streamed = ["", ""]
    reasons: list[str | None] = [None, None]
    usage = None
    for chunk in client.completions.create(
        model="embedded", prompt=PROMPT, n=2, max_tokens=12, seed=5, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert streamed == texts(completion)
    assert reasons == [choice.finish_reason for choice in completion.choices]
    assert usage is not None
    assert completion.usage is not None
    assert usage.completion_tokens == completion.usage.completion_tokens


def test_log_probabilities_of_an_echoed_prompt(client: OpenAI) -> None:
    """A prompt as text and as token ids: the same tokens, which join to the text; the first has no log-probability."""
    echoed = client.completions.create(
        model="embedded", prompt=PROMPT, echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    [choice] = echoed.choices
    assert choice.text.startswith(PROMPT)
    assert echoed.usage is not None
    assert choice.logprobs is not None
    tokens, logprobs, tops, offsets = (
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs,
        choice.logprobs.text_offset,
    )  # fmt: skip
    assert tokens is not None
    assert logprobs is not None
    assert tops is not None
    assert offsets is not None
    assert len(tokens) == len(logprobs) == len(tops) == len(offsets) == echoed.usage.total_tokens
    assert "".join(tokens) == choice.text
    assert [choice.text[offset:].startswith(token) for offset, token in zip(offsets, tokens, strict=True)]
    assert [*logprobs[:1], *tops[:1]] == [None, None]
    assert all(logprob <= 0 for logprob in logprobs[1:])
    for token, logprob, top in list(zip(tokens, logprobs, tops, strict=True))[-3:]:  # generated greedily
        assert top[token] == max(top.values()) == logprob


def test_lists_of_prompts_answer_in_their_order(client: OpenAI) -> None:
    prompts = [PROMPT, "She opened the door, and", "It"]
    alone = [
        client.completions.create(model="embedded", prompt=prompt, n=2, max_tokens=8, seed=9) for prompt in prompts
    ]
    together = client.completions.create(model="embedded", prompt=prompts, n=2, max_tokens=8, seed=9)
    assert texts(together) == list(itertools.chain.from_iterable(map(texts, alone)))

    tokenized = [TOKENIZER.encode(prompt) for prompt in prompts]
    by_ids = client.completions.create(model="embedded", prompt=tokenized, n=2, max_tokens=8, seed=9)
    assert texts(by_ids) == texts(together)
    one = client.completions.create(model="embedded", prompt=tokenized[0], n=2, max_tokens=8, seed=9)
    assert texts(one) == texts(alone[0])


def test_best_of_returns_the_likeliest(client: OpenAI) -> None:
    def score(choice: int, completion: Completion) -> float:
        logprobs = completion.choices[choice].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        return sum(logprobs.token_logprobs) / len(logprobs.token_logprobs)

    every = client.completions.create(model="embedded", prompt=PROMPT, n=4, max_tokens=8, seed=9, logprobs=0)
    best = client.completions.create(model="embedded", prompt=PROMPT, best_of=4, max_tokens=8, seed=9, logprobs=0)
    assert score(0, best) == pytest.approx(max(score(choice, every) for choice in range(4)))


def test_stop_strings_and_logit_bias(client: OpenAI) -> None:
    free = client.completions.create(model="embedded", prompt=PROMPT, temperature=0, max_tokens=16, logprobs=0)
    assert free.choices[0].logprobs is not None
    assert free.choices[0].logprobs.tokens is not None
    third = free.choices[0].logprobs.tokens[2]
    stopped = client.completions.create(model="embedded", prompt=PROMPT, temperature=0, max_tokens=16, stop=third)
    assert (stopped.choices[0].finish_reason, stopped.choices[0].text) == (
        "stop", free.choices[0].text[: free.choices[0].text.index(third)],
    )  # fmt: skip
    [banned] = TOKENIZER.encode(third)
    biased = client.completions.create(
        model="embedded", prompt=PROMPT, temperature=0, max_tokens=16, logit_bias={str(banned): -100}
    )
    assert third not in biased.choices[0].text


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["embedded"]


@pytest.mark.parametrize(
    ("fields", "expected", "parameter"),
    [
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": [99_999]}, openai.BadRequestError, "prompt"),
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
    ],
)
def test_refusals_are_the_exceptions_of_the_sdk(
    fields: dict[str, object], expected: type[openai.APIStatusError], parameter: str, client: OpenAI
) -> None:
    with pytest.raises(expected) as refused:
        client.completions.create(**{"model": "embedded", "prompt": PROMPT, **fields})  # type: ignore[call-overload]
    assert refused.value.param == parameter
    assert refused.value.code
    assert refused.value.type
    assert parameter in refused.value.message


def test_an_overloaded_server_is_asked_again_after_the_time_that_it_names(small: Tercet) -> None:
    """The default delay before the first retry is at most half a second; `Retry-After` says one second or more."""

    def num_refused() -> int:
        page = small.client.get("/metrics", headers={"x-api-key": small.environ["TERCET_API_KEY"]}).text
        counted = re.search(r'^tercet_refused_requests_total{reason="overloaded"} (\d+)', page, re.MULTILINE)
        return int(counted[1]) if counted else 0

    with client_of(small) as client, ThreadPoolExecutor(1) as threads:
        stream = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=256, stream=True)
        next(iter(stream))  # it occupies the only place
        began = time.monotonic()
        pending = threads.submit(
            client.completions.with_raw_response.create, model="embedded", prompt=PROMPT, max_tokens=1
        )
        until(num_refused, 10, "a refusal")
        stream.close()
        answer = pending.result()
    assert (answer.status_code, answer.retries_taken, num_refused()) == (200, 1, 1)
    assert time.monotonic() - began >= 1


def test_a_superseded_request_is_not_repeated(client: OpenAI, tercet: Tercet) -> None:
    """A newer request of the session cancels it; repeated, it would cancel the newer one in turn."""

    def complete(max_tokens: int) -> Completion:
        return client.completions.create(
            model="embedded", prompt=PROMPT, max_tokens=max_tokens, extra_body={"session": "s"}
        )

    with ThreadPoolExecutor(1) as threads:
        older = threads.submit(complete, 256)
        until(lambda: any(slot["in_flight"] for slot in tercet.slots()), 5, "the older request's start")
        assert complete(1).choices
        with pytest.raises(openai.ConflictError) as refused:
            older.result()
    assert refused.value.code == "superseded"
    assert refused.value.response.headers["x-should-retry"] == "false"
    assert refused.value.request.headers["x-stainless-retry-count"] == "0"


def test_a_key_is_sent_as_the_sdk_sends_it(small: Tercet) -> None:
    with client_of(small) as owner:
        assert owner.models.list().data
        with pytest.raises(openai.AuthenticationError):
            owner.with_options(api_key="wrong").models.list()
