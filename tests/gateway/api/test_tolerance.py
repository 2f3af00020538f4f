"""What clients of other servers send: fields, neutral values, nulls. Nothing that changes nothing fails a request.

`peer_schemas.json` has the fields and defaults that the peers publish, and requests as in their documentation.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from falcon import testing
from structlog.testing import capture_logs
from transformers import GenerationConfig

from gateway.api.openai.schema import parse_completion_request
from gateway.api.sagemaker import parse_jumpstart_request, parse_patsnap_request
from gateway.api.schema import (
    AutocompleteRequest,
    parse_autocomplete_request,
    parse_feedback_request,
    parse_others_job_request,
)
from gateway.api.tgi_schema import parse_tgi_body
from gateway.api.tolerance import TolerantParser
from shared.parsing import BodyParser, fields_of
from shared.protocol import GenerateRequest
from tests import compatibility
from tests.e2e.harness import ROOT
from tests.gateway.api.conftest import Api

SCHEMAS = compatibility.SCHEMAS
PROMPTS = {"/v1/completions": "prompt", "/jobs": "prompt", "/generate": "inputs", "/": "inputs"}
N_CTX = 1024  # of the stub pool's models


def post(api: Api, path: str, fields: dict[str, Any]) -> testing.Result:
    """Fields of Text Generation Inference's dialect are parameters."""
    is_nested = PROMPTS[path] == "inputs"
    return api.post(path, {PROMPTS[path]: "He saw", **({"parameters": fields} if is_nested else fields)})


def warnings_of(answer: testing.Result) -> list[str]:
    assert answer.status_code == 200, answer.text
    body = answer.json[0] if isinstance(answer.json, list) else answer.json
    found = body.get("warnings", [])
    assert isinstance(found, list)
    return found


# Fields ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer", SCHEMAS["peers"])
def test_no_field_fails_a_request_with_its_published_default(api: Api, peer: str) -> None:
    """One at a time, and all at once; without a warning, unless the default is a number that no GPT-2 has room for."""
    schema = SCHEMAS["peers"][peer]
    defaults = {name: field["default"] for name, field in schema["fields"].items() if "default" in field}
    defaults |= schema.get("nested", {})
    for name, value in defaults.items():
        warnings = warnings_of(post(api, schema["path"], {name: value}))
        assert all("lowered to 512" in warning for warning in warnings), (name, value, warnings)
    assert post(api, schema["path"], defaults).status_code == 200


@pytest.mark.parametrize("sample", SCHEMAS["samples"], ids=lambda sample: f"{sample['peer']}-{sample['path']}")
def test_no_request_of_the_peers_documentation_fails(api: Api, sagemaker: Api, sample: dict[str, Any]) -> None:
    """But for what would make the text wrong: a grammar, and an adapter."""
    body = {name: "small" if value == "MODEL" else value for name, value in sample["body"].items()}
    served = sagemaker if sample["path"] == "/invocations" else api
    answer = served.post(sample["path"], body, headers=sample.get("headers"))
    parameters: dict[str, Any] = sample["body"].get("parameters") or {}
    wrong = [name for name in ("grammar", "adapter_id") if parameters.get(name) not in (None, "null")]
    if wrong:
        assert answer.status_code == 422
        assert answer.json["error"].startswith(f"parameters.{wrong[0]} is not supported")
    else:
        assert answer.status_code == 200, answer.text


def test_the_defaults_of_the_installed_transformers_fail_nothing(api: Api) -> None:
    defaults = GenerationConfig().to_dict()
    assert api.post("/", {"inputs": "a", "parameters": defaults}).status_code == 200


@pytest.mark.parametrize("parser", [parse_completion_request, parse_tgi_body])
def test_a_known_field_of_peers_is_not_also_one_of_ours(parser: TolerantParser[Any]) -> None:
    own = fields_of(parser.kind)
    assert not own.keys() & parser.peer_fields.keys()
    assert not parser.aliases.keys() & parser.peer_fields.keys()


def test_the_tables_are_written_from_the_schemas() -> None:
    """After a change of a field: `make docs`. tests/documentation/test_written.py compares the table of API.md."""
    assert (ROOT / "docs/COMPATIBILITY.md").read_text(encoding="utf-8") == compatibility.page()


@pytest.mark.parametrize(
    "parser",
    [
        *(parse_autocomplete_request, parse_others_job_request, parse_feedback_request, parse_completion_request),
        *(parse_tgi_body, parse_jumpstart_request, parse_patsnap_request),
    ],
    ids=lambda parser: parser.kind.__name__,
)
def test_every_field_is_documented(parser: BodyParser[Any] | TolerantParser[Any]) -> None:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("API.md", "COMPATIBILITY.md"))
    nested = [fields_of(annotation) for annotation in fields_of(parser.kind).values()]
    names = {*fields_of(parser.kind), *parser.aliases, *(name for fields in nested for name in fields)}
    assert not [name for name in names if f"`{name}`" not in text]


def test_what_changes_nothing_is_ignored_without_a_word(api: Api) -> None:
    """Besides the published defaults: what bug reports, SDKs, editors and proxies send."""
    bodies: list[dict[str, Any]] = [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
        {"tools": [], "tool_choice": "none", "functions": None, "image_data": [], "guided_json": None, "samplers": []},
        {"response_format": {"type": "text"}, "adapter_id": "null", "stop": [""], "repeat_penalty": 1.0},
        {"max_tokens": 5, "max_completion_tokens": 5, "unknown": None},
        {"max_tokens": 5.0, "stream_options": {"include_usage": True}},  # without stream
    ]
    for fields in bodies:
        assert warnings_of(post(api, "/v1/completions", fields)) == [], fields


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/"])
def test_what_would_change_the_answer_is_named(api: Api, path: str) -> None:
    fields: dict[str, Any] = {"top_a": 0.2, "min_tokens": 3, "mirostat": 2, "watermark": True, "num_beams": 4}
    fields |= {"no_repeat_ngram_size": 2, "prompt_logprobs": 1, "samplers": ["temperature"]}
    for name, value in fields.items():
        [warning] = warnings_of(post(api, path, {name: value}))
        assert name in warning
    for unknown in ("brand_new", ""):
        [warning] = warnings_of(post(api, path, {unknown: 1}))
        assert f"Unknown and ignored: {'' if path == '/v1/completions' else 'parameters.'}{unknown}" in warning


def test_a_warning_reaches_the_client_of_every_dialect_also_in_a_stream(api: Api, sagemaker: Api) -> None:
    def first_chunk(path: str, body: dict[str, Any]) -> dict[str, Any]:
        chunks = [line for line in api.post(path, body).text.splitlines() if line]
        assert sum("min_tokens" in chunk for chunk in chunks) == 1
        found = json.loads(chunks[0].removeprefix("data:"))
        assert isinstance(found, dict)
        return found

    for path, body in (
        ("/v1/completions", {"prompt": "a", "min_tokens": 3, "stream": True}),
        ("/generate_stream", {"inputs": "a", "parameters": {"min_tokens": 3}}),
    ):
        assert "min_tokens" in first_chunk(path, body)["warnings"][0]
    answers = {
        name: sagemaker.post("/invocations", {name: "a", "min_tokens": 3}).json
        for name in ("input", "text_inputs", "prompt", "inputs")
    }
    assert all("min_tokens" in str(answer) for answer in answers.values()), answers
    assert answers["input"]["output"]
    assert answers["text_inputs"]["generated_texts"]


def test_what_would_make_the_text_wrong_is_refused_by_name(api: Api) -> None:
    fields = {
        "grammar": "root ::= x",
        "json_schema": {},
        "guided_regex": "[a-z]",
        "structured_outputs": {"json": {}},
        "response_format": {"type": "json_object"},
        "image_data": [{"data": "aGk=", "id": 1}],
        "images": ["aGk="],
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{}],
        "lora": [{"id": 0}],
        "prompt_embeds": "aGk=",
    }
    for name, value in fields.items():
        answer = post(api, "/v1/completions", {name: value})
        assert (answer.status_code, answer.json["error"]["param"]) == (400, name)
        assert post(api, "/generate", {name: value}).status_code == 422
    assert not api.pool.workers[0].calls


def test_a_typo_gets_a_proposal(api: Api) -> None:
    [warning] = warnings_of(post(api, "/v1/completions", {"tempreature": 0, "max_token": 3}))
    assert warning == (
        "Unknown and ignored: tempreature, max_token. Perhaps tempreature should be temperature."
        " Perhaps max_token should be max_tokens."
    )
    [misplaced] = warnings_of(api.post("/generate", {"inputs": "a", "top_p": 0.5}))
    assert misplaced == "Unknown and ignored: top_p. Perhaps top_p should be parameters.top_p."


def test_many_unknown_names_are_shortened_in_the_answer_and_counted_in_the_log(api: Api) -> None:
    names = {f"{'x' * 100}{number}": "secret" for number in range(300)}
    with capture_logs() as logs:
        [warning] = warnings_of(post(api, "/v1/completions", names))
    assert len(warning) < 300
    assert "and 295 more" in warning
    [finished] = [line for line in logs if line["event"] == "request_finished"]
    assert finished["unknown_fields"] == 300
    assert not any("xxx" in str(line) or "secret" in str(line) for line in logs)


def test_tokenization_ignores_what_changes_nothing(api: Api) -> None:
    for body in (
        {"inputs": "ab", "add_special_tokens": True, "model": "tgi", "parameters": {"watermark": True}},
        {"prompt": "ab", "add_special_tokens": True, "return_token_strs": None, "max_length": 7, "unheard": [1]},
        {"prompt": "ab", "truncation": False, "model": None},
    ):
        assert api.post("/tokenize", body).status_code == 200


def test_our_own_dialect_is_strict_about_names_and_takes_nulls(api: Api) -> None:
    names = [name for name in AutocompleteRequest.__struct_fields__ if name != "context"]
    assert api.complete(**dict.fromkeys(names)).status_code == 200
    assert api.complete(samples=None, n=2).status_code == 200
    for unknown in ({"temprature": 1}, {"user": "u"}, {"nonsense": None}):
        answer = api.complete(**unknown)
        assert answer.status_code == 422
        assert answer.json["detail"].startswith(f"Unknown field {next(iter(unknown))}")


# Values ------------------------------------------------------------------------------------------


def last_call(api: Api) -> GenerateRequest:
    return api.pool.workers[0].calls[-1]


def test_minus_1_tokens_are_as_many_as_there_is_room_for(api: Api) -> None:
    named = [{name: -1} for name in ("max_tokens", "n_predict", "max_completion_tokens")]
    for fields in (*named, {"max_tokens": -2}, {"max_tokens": N_CTX}):
        [warning] = warnings_of(post(api, "/v1/completions", fields))
        assert warning == "max_tokens was lowered to 512, half of the model's context."
        assert (last_call(api).sampling.max_new_tokens, last_call(api).max_prompt_tokens) == (512, 512)
    assert warnings_of(api.post("/v1/completions", {"prompt": [[1] * 24, [2] * 20], "max_tokens": -1})) == []
    assert last_call(api).sampling.max_new_tokens == N_CTX - 24
    assert "lowered to 512" in warnings_of(post(api, "/generate", {"max_new_tokens": -1}))[0]
    assert api.complete(max_tokens=-1).status_code == 200
    assert last_call(api).max_prompt_tokens == N_CTX - 20
    assert api.complete(max_tokens=0).status_code == 422


def test_biases_of_tokens_that_do_not_exist_are_ignored_with_a_warning(api: Api) -> None:
    for bias, known, num_ignored in (
        ({"50256": -100}, (), 1),
        ({"7": 1, "x": 1, "9" * 5000: 1}, ((7, 1.0),), 2),
        ([[7, 1.5], [8, False], ["sea", -0.5]], ((7, 1.5), (8, -100.0)), 1),
        ([[7, 1.5]], ((7, 1.5),), 0),
        ([], (), 0),
    ):
        warnings = warnings_of(post(api, "/v1/completions", {"logit_bias": bias}))
        assert len(warnings) == bool(num_ignored)
        assert all(f"ignored for {num_ignored} tokens" in warning for warning in warnings)
        assert last_call(api).sampling.logit_bias == known


def test_truncate_prompt_tokens_is_honoured(api: Api) -> None:
    assert warnings_of(post(api, "/v1/completions", {"truncate_prompt_tokens": 99})) == []
    assert last_call(api).max_prompt_tokens == 99
    for prompt in ([1, 2, 3, 4], [[1, 2, 3, 4]]):
        assert warnings_of(api.post("/v1/completions", {"prompt": prompt, "truncate_prompt_tokens": 2})) == []
        assert last_call(api).prompt_ids == [3, 4]
    for off in (0, -1, None):
        assert warnings_of(post(api, "/v1/completions", {"truncate_prompt_tokens": off})) == []
        assert last_call(api).max_prompt_tokens == N_CTX - 16


def test_logprobs_of_chat_clients_are_true_or_false(api: Api) -> None:
    for value, number in ((True, 0), (False, None), (0, 0), (5, 5)):
        choice = post(api, "/v1/completions", {"logprobs": value}).json["choices"][0]
        assert last_call(api).logprobs == number
        assert (choice["logprobs"] is None) is (number is None)


def test_two_names_of_a_field(api: Api) -> None:
    """The dialect's own name counts. Two texts to complete are an error: one of them would be lost."""
    [warning] = warnings_of(post(api, "/v1/completions", {"max_tokens": 5, "n_predict": 7}))
    assert warning == "n_predict was ignored: it is another name of max_tokens, which was sent too."
    assert last_call(api).sampling.max_new_tokens == 5
    assert len(post(api, "/v1/completions", {"num_return_sequences": 3}).json["choices"]) == 3
    # A value that could not be one is an error, though it is not used.
    for fields in ({"max_tokens": 5, "n_predict": "7"}, {"n": 1, "n_cmpl": True}, {"n_cmpl": 99, "n": 1}):
        assert post(api, "/v1/completions", fields).status_code == 400


# Three completions -------------------------------------------------------------------------------


def test_greedy_completions_of_a_text_start_with_different_tokens(api: Api) -> None:
    assert post(api, "/generate", {"num_return_sequences": 3}).status_code == 200
    assert sorted(call.sampling.first_rank for call in api.pool.workers[0].calls) == [0, 1, 2]
    assert {call.sampling.temperature for call in api.pool.workers[0].calls} == {0}


def test_the_answer_to_a_list_is_the_list_of_answers(api: Api, sagemaker: Api) -> None:
    inputs = [f"text {number}" for number in range(5)]
    parameters = {"return_full_text": True, "max_new_tokens": 3}
    objects = api.post("/generate", {"inputs": inputs, "parameters": parameters}).json
    assert [one["generated_text"][:6] for one in objects] == inputs
    for served, path in ((api, "/"), (sagemaker, "/invocations")):
        lists = served.post(path, {"inputs": inputs, "parameters": parameters}).json
        assert [[one["generated_text"][:6] for one in found] for found in lists] == [[text] for text in inputs]
    for name in ("num_return_sequences", "n"):
        both = {"inputs": inputs, "parameters": {**parameters, name: 3}}
        assert [len(found) for found in api.post("/", both).json] == [3] * 5
    assert api.post("/generate", {"inputs": ["a"] * 129}).status_code == 422
    assert api.post("/generate", {"inputs": ["a"] * 33, "parameters": {"best_of": 8}}).status_code == 422
    assert api.post("/generate", {"inputs": []}).status_code == 400
    assert api.post("/generate_stream", {"inputs": ["a", "b"]}).status_code == 422


def test_max_length_counts_the_input(api: Api) -> None:
    """As in transformers: a text of 6 tokens and `max_length` 50 leave 44."""
    assert warnings_of(post(api, "/", {"max_length": 50})) == []
    assert last_call(api).sampling.max_new_tokens == 44
    assert warnings_of(post(api, "/", {"max_length": 50, "max_new_tokens": 3})) == []
    assert last_call(api).sampling.max_new_tokens == 3
    [warning] = warnings_of(post(api, "/", {"max_length": 4}))
    assert warning.startswith("max_length was raised to 7")
    assert last_call(api).sampling.max_new_tokens == 1
