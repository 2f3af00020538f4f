"""Hooks of the schemathesis run in `test_openapi.py`; its process imports them.

A valid body may still ask for more than the server allows (bounds that depend on a setting, a model or an earlier
answer, rules between two fields, which no schema knows) or for more work than a test has time for. Such fields of a
valid request are changed; a request that is wrong on purpose is sent as it is.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

# The largest value that is sent, by field.
MAX_VALUES: dict[str, float] = {
    "n_samples": 2,
    "samples": 2,
    "n": 2,
    "num_samples": 2,
    "best_of": 2,
    "num_return_sequences": 1,
    "max_length": 60,
    "length": 4,
    "max_time": 5,
    "max_tokens": 4,
    "max_new_tokens": 4,
    "truncate": 4,
    "top_k": 500,
    "top_n": 500,
    "index": 0,
}
MIN_TIME_S = 1.0  # no text can be ready within a few milliseconds
MAX_CHARS = 500
NUM_TOKENS = 4  # where a request does not say
MAX_ITEMS = 2
# Token ids that every model has.
MAX_TOKEN_ID = 99
TGI_PATHS = ("/", "/generate", "/generate_stream")
# Parameters of a generation that are valid with some of the others only.
RULED = ("best_of", "clean", "decoder_input_details", "num_return_sequences", "n", "max_time")
NUMBERS_OF_TOKENS = ("max_tokens", "max_new_tokens", "n_predict", "num_predict", "max_completion_tokens")
MODEL_FIELDS = ("model_size", "model")
MODEL = "embedded"
_numbers = itertools.count()


@schemathesis.hook
def before_call(_context: schemathesis.HookContext, case: schemathesis.Case[Any], _kwargs: dict[str, Any]) -> None:
    if case.meta is None or case.meta.generation.mode != GenerationMode.POSITIVE or not isinstance(case.body, dict):
        return
    if "Idempotency-Key" in (case.headers or {}):
        case.headers["Idempotency-Key"] = f"key-{next(_numbers)}"  # the same key with another body is an error
    body = lowered(case.body)
    if case.path in TGI_PATHS:
        body["parameters"] = _generation_parameters(body.get("parameters") or {})
        if (case.path == "/generate_stream" or body.get("stream")) and isinstance(body.get("inputs"), list):
            body["inputs"] = body["inputs"][0]
    if case.path == "/v1/completions":
        for name in NUMBERS_OF_TOKENS[1:]:  # other names of the same
            body.pop(name, None)
        if body.get("max_tokens") is None:
            body["max_tokens"] = NUM_TOKENS
    if "Prefer" in (case.headers or {}):
        body.pop("stream", None)  # a job is not streamed
        body.pop("session", None)  # nor superseded
    if not body.get("stream"):
        body.pop("stream_options", None)
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if case.path == "/v1/completions":
        body.pop("clean", None)  # only for a single prompt, and without some of the other fields
    case.body = body


def _generation_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    parameters = {name: value for name, value in parameters.items() if name not in RULED}
    if parameters.get("max_new_tokens") is None:
        parameters["max_new_tokens"] = NUM_TOKENS
    return parameters


def lowered(body: dict[str, Any]) -> dict[str, Any]:
    """The body within the bounds above, in its members too."""
    return {name: _value(name, value) for name, value in body.items()}


def _value(name: str, value: Any) -> Any:
    if name == "logit_bias" and isinstance(value, dict):
        return {token: bias for token, bias in value.items() if re.fullmatch("[0-9]{1,2}", token)}
    if isinstance(value, dict):
        return lowered(value)
    if name == "prompt" and isinstance(value, list):
        value = [item for item in value if type(item) is type(value[0])]  # a mixture is an error
    if isinstance(value, list):
        return [_value(name, item) for item in value[:MAX_ITEMS]]
    if isinstance(value, str):
        return MODEL if name in MODEL_FIELDS else value[:MAX_CHARS]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name == "max_time" and 0 < value < MIN_TIME_S:
        return MIN_TIME_S
    if name in NUMBERS_OF_TOKENS and value <= 0:  # as many as there is room for
        return NUM_TOKENS
    return min(value, MAX_TOKEN_ID if name == "prompt" else MAX_VALUES.get(name, value))
