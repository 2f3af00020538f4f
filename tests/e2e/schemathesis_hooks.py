"""Hooks of the schemathesis run in `test_openapi.py`; its process imports them.

A valid body may still ask for more than the server allows (bounds that depend on a setting, a model or an earlier
answer, which no schema knows) or for more work than a test has time for. Such fields of a valid body are lowered; a
body that is wrong on purpose is sent as it is.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis.generation import GenerationMode

# By field: the largest value that is sent.
MAX_VALUES: dict[str, float] = {
    "n_samples": 2, "samples": 2, "n": 2, "length": 4, "max_time": 5, "max_tokens": 4, "top_k": 500, "index": 0,
}  # fmt: skip
MAX_CHARS = 500
MODEL_FIELDS = ("model_size", "model")
MODEL = "embedded"


@schemathesis.hook
def before_call(_context: schemathesis.HookContext, case: schemathesis.Case[Any], _kwargs: dict[str, Any]) -> None:
    if case.meta is not None and case.meta.generation.mode == GenerationMode.POSITIVE:
        case.body = lowered(case.body)


def lowered(body: Any) -> Any:
    """The body within the bounds above, in its members too."""
    if not isinstance(body, dict):
        return body
    return {name: _value(name, value) for name, value in body.items()}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return lowered(value)
    if isinstance(value, str):
        return MODEL if name in MODEL_FIELDS else value[:MAX_CHARS]
    if name in MAX_VALUES and isinstance(value, int | float) and not isinstance(value, bool):
        return min(value, MAX_VALUES[name])
    return value
