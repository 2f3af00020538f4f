"""What all dialects have alike: fields and their bounds, sessions, seeds, special tokens, errors. Over stub workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from falcon import testing

from gateway.api.callers import SESSION_HEADER
from gateway.api.fields import MAX_SESSION_CHARS, OpenAIFields, OwnFields, SamplingFields, TgiFields
from gateway.api.openai.schema import CompletionRequest
from gateway.api.tgi_schema import TgiParameters
from shared.protocol import MAX_SEED, Accepted, GenerateRequest, Sampling, Token
from tests.gateway.api.conftest import Api, MakeApi, respond
from tests.gateway.generation.stubs import Hang, Refusal, Step, hang
from tests.gateway.pool.reservations import claim

N_CTX, VOCAB_SIZE = 1024, 500  # of the stub pool's model


@dataclass(frozen=True)
class Dialect:
    """How a client sends a text and fields, and what it reads in an error.

    Attributes:
        prompt: the field of the text.
        parameters: the object that has the other fields; "" for the body itself.
        invalid: the status of a wrong field.
    """

    path: str
    prompt: str
    fields: type[SamplingFields]
    parameters: str = ""
    invalid: int = 422

    def body(self, text: str = "He saw", **fields: Any) -> dict[str, Any]:
        return {self.prompt: text, **({self.parameters: fields} if self.parameters else fields)}

    def post(self, api: Api, headers: dict[str, str] | None = None, **fields: Any) -> testing.Result:
        return api.post(self.path, self.body(**fields), headers=headers)


OWN = Dialect("/autocomplete", "context", OwnFields)
OPENAI = Dialect("/v1/completions", "prompt", OpenAIFields, invalid=400)
GENERATE, STREAM, ROOT = (
    Dialect(path, "inputs", TgiFields, "parameters") for path in ("/generate", "/generate_stream", "/")
)
DIALECTS = (OWN, OPENAI, GENERATE, STREAM, ROOT)
INVOCATIONS = tuple(
    Dialect("/invocations", name, TgiFields) for name in ("input", "text_inputs", "inputs", "prompt", "context")
)
every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)


def code_and_message(answer: testing.Result) -> tuple[str | None, str]:
    """What a client decides by, and the sentence, in each dialect's shape."""
    found = answer.json
    if answer.headers["content-type"] == "application/problem+json":
        assert found["status"] == answer.status_code
        return found["code"], found["detail"]
    if isinstance(found["error"], dict):
        assert found["error"].keys() == {"message", "type", "param", "code"}
        return found["error"]["code"], found["error"]["message"]
    return found["error_type"], found["error"]


# Fields ------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "typical_p": 0.8,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.3,
    "presence_penalty": -0.4,
    "logit_bias": {"7": -100, "8": 1.5},
    "stop": ["a", "b", "c"],
    "single_line": True,
}
TAKEN = VALUES | {"logit_bias": ((7, -100.0), (8, 1.5)), "stop": ("a", "b", "c")}
NUM_TOKENS = {OWN: {"length": 9}, OPENAI: {"max_tokens": 9}}


@every_dialect
def test_each_sampling_field_reaches_the_worker(api: Api, dialect: Dialect) -> None:
    names = set(dialect.fields.__struct_fields__) & VALUES.keys()
    assert len(names) == len(Sampling.__struct_fields__) - 2 or dialect is not OPENAI  # OpenAI's has all of them
    sent = {name: VALUES[name] for name in names} | NUM_TOKENS.get(dialect, {"max_new_tokens": 9})
    assert dialect.post(api, seed=4, **sent).status_code == 200
    for number, call in enumerate(sorted(api.pool.workers[0].calls, key=lambda call: call.seed)):
        assert call.sampling == Sampling(max_new_tokens=9, **{"top_k": 0, "top_p": 1.0, **{n: TAKEN[n] for n in names}})
        assert (call.prompt, call.seed, call.heal) == ("He saw", 4 + number, dialect is OWN)


# Values within and beyond the bounds of each field; a number is neither a string nor a truth value.
Bounds = dict[str, tuple[list[Any], list[Any]]]
SHARED_BOUNDS: Bounds = {
    "min_p": ([0, 1], [-0.1, 1.001, "1"]),
    "top_k": ([0, -1, 1, VOCAB_SIZE, 100_000], [-2, 0.5, "1"]),
    "top_p": ([0, 0.001, 1], [-0.1, 1.001, True]),
    "repetition_penalty": ([0.01, 1.0, 100], [0, 0.009, 100.1]),
    "frequency_penalty": ([-2, 0, 2], [-2.1, 2.1]),
    "max_time": ([0, 0.5], [-1, "1"]),
    "clean": ([True, False, None], ["x"]),
}
BOUNDS: dict[str, Bounds] = {
    "/v1/completions": SHARED_BOUNDS
    | {
        "model": (["", "small", None], [7, "x" * 129]),
        "prompt": (
            ["a", ["a", "b"], ["a"] * 128, [0, VOCAB_SIZE - 1], [1] * (N_CTX - 16), [[1], [1] * (N_CTX - 16)]],
            [["a"] * 129, [[1]] * 129, [], ["a", 1], [[1], 1], [VOCAB_SIZE], [[2**70]], [-1], [1.5], 7],
        ),
        "temperature": ([0, 2], [-0.01, 2.01, "1", True]),
        "typical_p": ([0, 1, 0.95], [-0.1, 1.1]),
        "presence_penalty": ([-2, 2], [-2.1, 2.1]),
        "max_tokens": ([0, N_CTX - 1, 5.0, None], [-3, 1.5]),
        "n": ([1, 8], [0, 9]),
        "best_of": ([0, 1, 8], [9, -1]),
        "logprobs": ([0, 20, True, False], [21, -1]),
        "echo": ([True, False], [1]),
        "stream": ([False, None], ["yes"]),
        "stream_options": ([None, {"include_usage": True}], [True, {"include_usage": 7}]),
        "suffix": (["", "the end", None], [["x"]]),
        "stop": ([[], "", "a", ["x" * 256] * 16], [["x"] * 17, ["x" * 257], [1]]),
        "logit_bias": ([{}, {"0": -100, "499": 100}, [[7, False]]], [{"1": 101}, {str(k): 1 for k in range(1025)}]),
        "single_line": ([True, False], [1]),
        "seed": ([-MAX_SEED - 1, -1, 0, 2**64 - 1], [0.5, "1"]),
        "session": (["s" * MAX_SESSION_CHARS, None], ["s" * (MAX_SESSION_CHARS + 1)]),
        "max_time": ([0, 0.5, 30, None], [-1, 31]),
        "truncate_prompt_tokens": ([-1, 0, 1, None], [-2, 0.5]),
    },
    "/generate": SHARED_BOUNDS
    | {
        "best_of": ([0, 1, 8], [-1, 9, 1.5, "2"]),
        "num_return_sequences": ([1, 8, None], [0, -1, 9]),
        "temperature": ([0, 0.001, 1, 100], [-1, 100.1, "1"]),
        "typical_p": ([None, 1, 0.95, "null"], [0, -0.1, 1.1, "1"]),
        "do_sample": ([True, False, None], [1, "true"]),
        "max_new_tokens": ([1, 1023, 1024, -1, 10**300], [0, -2]),
        "max_length": ([1, 50, 10**300, 0, -1], [-2, 1.5]),
        "max_time": ([0, 0.5, 31], [-1, "1"]),
        "return_full_text": ([True, False, None], ["no"]),
        "stop": ([[], ["a"], ["a"] * 4, ["x" * 256], [""], "", "a"], [["a"] * 5, ["x" * 257], 1, [1]]),
        "stop_sequences": ([[], ["a", "b", "c", "d"], [""]], [["a"] * 5]),
        "seed": ([-1, 0, 2**63 - 1, 2**64 - 1, "null"], [0.5, "1"]),
        "truncate": ([0, -1, 1, 1023, 1024, "null"], [-2, "1"]),
        "details": ([True, False, None], [0]),
        "decoder_input_details": ([False, None], ["x"]),
        "top_n_tokens": ([0, 5, None], [-1, 6]),
    },
}


@pytest.mark.parametrize(
    ("dialect", "name"),
    [(dialect, name) for dialect in (OPENAI, GENERATE) for name in BOUNDS[dialect.path]],
    ids=lambda value: getattr(value, "path", value),
)
def test_a_field_accepts_what_is_within_its_bounds_and_names_itself_otherwise(
    api: Api, dialect: Dialect, name: str
) -> None:
    """`tests/gateway/api/test_bounds.py` has those of our own dialect."""
    within, beyond = BOUNDS[dialect.path][name]
    for value in within:
        answer = dialect.post(api, **{name: value})
        assert answer.status_code == 200, (value, answer.text)
    num_calls = len(api.pool.workers[0].calls)
    for value in beyond:
        answer = dialect.post(api, **{name: value})
        code, message = code_and_message(answer)
        assert (answer.status_code, code) == (dialect.invalid, "validation" if dialect is GENERATE else code), value
        assert name in message.partition(" must ")[0]
        assert len(message) < 300
        assert dialect is GENERATE or answer.json["error"]["param"].partition(".")[0] == name
    assert len(api.pool.workers[0].calls) == num_calls


def test_each_field_has_bounds() -> None:
    for dialect, kind in ((OPENAI, CompletionRequest), (GENERATE, TgiParameters)):
        assert BOUNDS[dialect.path].keys() == set(kind.__struct_fields__)


LONG = [[1] * 127] * 128


@pytest.mark.parametrize(
    ("dialect", "named", "fields"),
    [
        (OPENAI, None, {"prompt": ["a"] * 32, "best_of": 8, "max_tokens": 0}),
        (OPENAI, None, {"prompt": [1] * (N_CTX - 1), "max_tokens": 0}),
        (OPENAI, None, {"prompt": LONG, "n": 2, "echo": True, "logprobs": 15, "max_tokens": 1}),
        (OPENAI, "prompt", {"prompt": ["a"] * 33, "best_of": 8}),
        (OPENAI, "max_tokens", {"max_tokens": N_CTX, "echo": True}),
        (OPENAI, "best_of", {"n": 3, "best_of": 2}),
        (OPENAI, "best_of", {"best_of": 2, "stream": True}),
        (OPENAI, "logprobs", {"prompt": LONG, "n": 2, "echo": True, "logprobs": 15}),
        (OPENAI, "logprobs", {"prompt": ["a" * 2000] * 64, "echo": True, "logprobs": 8}),
        *((OPENAI, "clean", {"clean": True, **fields}) for fields in ({"prompt": ["a", "b"]}, {"prompt": [1]})),
        *((OPENAI, "clean", {"clean": True, **fields}) for fields in ({"echo": True}, {"best_of": 2})),
        *((OPENAI, "clean", {"clean": True, **fields}) for fields in ({"logprobs": 1}, {"max_tokens": 0})),
        (GENERATE, "stop", {"stop": ["a", "b", "c"], "stop_sequences": ["d", "e"]}),
        (STREAM, "best_of", {"best_of": 2, "do_sample": True}),
        (STREAM, "num_return_sequences", {"num_return_sequences": 2}),
        (STREAM, "decoder_input_details", {"decoder_input_details": True}),
        (STREAM, "clean", {"clean": True}),
    ],
)
def test_fields_that_exclude_each_other(api: Api, dialect: Dialect, named: str | None, fields: dict[str, Any]) -> None:
    answer = dialect.post(api, **fields)
    assert answer.status_code == (200 if named is None else dialect.invalid), answer.text
    if named is not None:
        assert code_and_message(answer)[1].startswith(f"{named} ")
        assert api.pool.workers[0].calls == []


@every_dialect
def test_a_null_is_as_leaving_a_field_out(api: Api, dialect: Dialect) -> None:
    """SDKs send null for what was not set."""
    kinds: dict[Dialect, type[msgspec.Struct]] = {OPENAI: CompletionRequest, OWN: OwnFields}
    nulls = dict.fromkeys(kinds.get(dialect, TgiParameters).__struct_fields__)
    nulls.pop("prompt", None)
    for fields in ({}, nulls):
        assert dialect.post(api, seed=1, **{name: None for name in fields if name != "seed"}).status_code == 200
    calls = [
        {**msgspec.to_builtins(call), "request_id": "", "group": None, "deadline_ms": 0}
        for call in api.pool.workers[0].calls
    ]
    first, second = calls[: len(calls) // 2], calls[len(calls) // 2 :]
    assert sorted(first, key=str) == sorted(second, key=str)


@every_dialect
def test_seed_minus_1_is_random_and_a_seed_of_64_bits_counts(api: Api, dialect: Dialect) -> None:
    def seed(value: int) -> int:
        api.pool.workers[0].calls.clear()
        assert dialect.post(api, seed=value).status_code == 200
        return min(call.seed for call in api.pool.workers[0].calls)

    assert len({seed(-1) for _ in range(3)}) == 3
    assert seed(7) == 7
    assert seed(MAX_SEED + 8) == 7
    assert seed(2**64 - 64) == MAX_SEED - 63


# Texts and sessions ------------------------------------------------------------------------------

SPECIAL = "The file ends in <|endoftext|>"


@pytest.mark.parametrize("dialect", [*DIALECTS, *INVOCATIONS], ids=lambda dialect: f"{dialect.path}-{dialect.prompt}")
def test_special_tokens_are_text_for_a_writer_and_tokens_for_other_servers_clients(
    api: Api, sagemaker: Api, dialect: Dialect
) -> None:
    served = sagemaker if dialect in INVOCATIONS else api
    is_text = dialect.prompt == "context"
    more: list[dict[str, Any]] = [{}]
    if dialect is OWN:
        more += [
            {"suffix": SPECIAL, "stop": ["<|endoftext|>"]},
            {"clean": False, "explain": 3},
            {"strategy": "predict"},
        ]
    if dialect is OPENAI:
        more += [{"suffix": SPECIAL}, {"clean": True}, {"echo": True, "logprobs": 1}]
    for fields in more:
        assert dialect.post(served, text=SPECIAL, **fields).status_code == 200
    assert {call.special_as_text for call in api.pool.workers[0].calls} == {is_text}


@every_dialect
def test_half_of_a_surrogate_pair_is_the_replacement_character(api: Api, dialect: Dialect) -> None:
    """`tests/shared/test_parsing.py` has the places where it may stand."""
    body = json.dumps(dialect.body("\ude00 went", stop=["\ud83d"]))
    assert api.request("POST", dialect.path, body=body).status_code == 200
    assert {call.prompt for call in api.pool.workers[0].calls} == {"\ufffd went"}
    assert {call.sampling.stop for call in api.pool.workers[0].calls} == {("\ufffd",)}


@pytest.mark.parametrize("dialect", [OWN, OPENAI], ids=lambda dialect: dialect.path)
def test_workers_get_the_beginning_of_a_suffix_that_is_not_blank(api: Api, dialect: Dialect) -> None:
    long, emojis = "x" * 5000, "\U0001f600" * 300
    for suffix, expected in ((None, ""), ("", ""), (" \n ", ""), (long, long[:200]), (emojis, emojis[:200])):
        api.pool.workers[0].calls.clear()
        assert dialect.post(api, suffix=suffix).status_code == 200
        assert {call.suffix for call in api.pool.workers[0].calls} == {expected}
    for wrong in (1, ["a"]):
        answer = dialect.post(api, suffix=wrong)
        assert (answer.status_code, code_and_message(answer)[1][:6]) == (dialect.invalid, "suffix")


def sessions(api: Api) -> set[str | None]:
    return {call.session for call in api.pool.workers[0].calls}


@every_dialect
def test_a_header_names_the_session_and_the_body_comes_first(api: Api, dialect: Dialect) -> None:
    longest = "s" * MAX_SESSION_CHARS
    answer = dialect.post(api, headers={SESSION_HEADER: f"{longest}s"})
    assert answer.status_code == dialect.invalid
    assert SESSION_HEADER in code_and_message(answer)[1]
    for session, headers in ((None, {}), (None, {SESSION_HEADER: ""}), (longest, {SESSION_HEADER: longest})):
        api.pool.workers[0].calls.clear()
        assert dialect.post(api, headers=headers).status_code == 200
        assert sessions(api) == {session}
    if dialect in {OWN, OPENAI}:
        api.pool.workers[0].calls.clear()
        assert dialect.post(api, headers={SESSION_HEADER: "h"}, session="b").status_code == 200
        assert sessions(api) == {"b"}


# Errors ------------------------------------------------------------------------------------------


@every_dialect
def test_an_error_before_the_fields_has_the_dialects_shape(api: Api, dialect: Dialect) -> None:
    requests: list[tuple[int, str, str | None, dict[str, Any]]] = [
        (400, "invalid_json", "validation", {"body": b"{"}),
        (400, "invalid_json", "validation", {"body": b"[1]"}),
        (413, "body_too_large", "validation", {"body": b" " * 300_001}),
        (403, "forbidden_origin", None, {"body": b"{}", "headers": {"Origin": "https://evil.example"}}),
    ]
    for status, code, tgi_type, request in requests:
        answer = api.request("POST", dialect.path, **request)
        assert (answer.status_code, code_and_message(answer)[0]) == (status, tgi_type if dialect.parameters else code)
        assert answer.headers["x-request-id"]


@every_dialect
def test_an_answer_that_fails_has_a_status_and_code_of_the_dialect(make_api: MakeApi, dialect: Dialect) -> None:
    refusals = [Refusal(422, "prompt_too_long"), Refusal(422, "invalid_request"), Refusal(500, "device")]
    expected = {
        OWN: [(422, "prompt_too_long"), (422, "invalid_request"), (503, "no_completion")],
        OPENAI: [(400, "context_length_exceeded"), (400, "invalid_request"), (503, "no_completion")],
    }
    in_tgi = [(422, "validation"), (422, "validation"), (424, "generation")]
    api = make_api(lambda request: [refusals[request.seed // 10]])
    for number, (status, code) in enumerate(expected.get(dialect, in_tgi)):
        answer = dialect.post(api, seed=10 * number)
        assert (answer.status_code, code_and_message(answer)[0]) == (status, code)
        assert dialect is not OPENAI or answer.json["error"]["param"] == (None if number else "prompt")


@every_dialect
def test_a_request_without_an_answer_in_time(make_api: MakeApi, dialect: Dialect) -> None:
    """A stream that has not begun has a status."""
    api = make_api(hang)
    statuses: dict[Dialect, tuple[int, str]] = {OWN: (504, "deadline_exceeded"), OPENAI: (504, "deadline_exceeded")}
    expected = statuses.get(dialect, (500, "incomplete_generation"))
    streams: list[dict[str, Any]] = [{}, {"stream": True}] if dialect is OPENAI else [{}]
    for fields in streams:
        answer = dialect.post(api, max_time=0.1, **fields)
        assert (answer.status_code, code_and_message(answer)[0]) == expected
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("dialect", [OWN, OPENAI, STREAM], ids=lambda dialect: dialect.path)
def test_an_error_after_the_first_event_is_the_last_one(make_api: MakeApi, dialect: Dialect) -> None:
    def begin(_: GenerateRequest) -> Iterator[Step]:
        yield Accepted()
        yield Token(text=" w", token_id=1, logprob=-1.0, token_text=" w", begin=0)
        yield Hang()

    fields: dict[str, Any] = {} if dialect is STREAM else {"stream": True}
    answer = dialect.post(make_api(begin), max_time=0.2, **fields)
    assert answer.status_code == 200
    *_, last, rest = answer.text.split("\n\n")
    assert rest == ""
    assert last.startswith("event: error\n") is (dialect is OWN)
    error = json.loads(last.partition("data: ")[2])
    codes = {OWN: error.get("code"), STREAM: error.get("error_type")}
    found = codes[dialect] if dialect in codes else error["error"]["code"]
    assert found == ("incomplete_generation" if dialect is STREAM else "deadline_exceeded")
    assert dialect is not OWN or error["request_id"] == answer.headers["x-request-id"]


@every_dialect
def test_a_full_queue_is_refused_with_a_time_to_return(make_api: MakeApi, dialect: Dialect) -> None:
    api = make_api(respond, queue=0)
    for _ in range(3):
        api.pool.admission.reserve(claim(), 1)
    answer = dialect.post(api)
    assert (answer.status_code, code_and_message(answer)[0]) == (429 if dialect.parameters else 503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
