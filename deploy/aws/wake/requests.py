"""Checks the body of `POST /jobs` and writes it as the gateway reads it.

The names, ranges and aliases are those of the gateway's `JobRequest`; a test compares them. What depends on the model
(its name, its vocabulary, its context) is checked by the gateway, which then fails the job.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from deploy.aws.wake.answers import Refusal, invalid

MAX_CONTEXT_CHARS = 1 << 20
ALIASES = {"samples": "n_samples", "n": "n_samples", "num_samples": "n_samples", "prompt": "context", "top_n": "top_k"}
# A body with one of these is that of another deployment's client, whose further fields are ignored, and whose page
# sends what its form holds: strings.
OTHERS_NAMES = frozenset({"prompt", "num_samples", "top_n"})
NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
MAX_NUMBER_CHARS = 40
MAX_EXACT = 2**53
Check = tuple[Callable[[Any], bool], str]  # and what a value must be


def _whole(low: int, high: float, *, optional: bool = False) -> Check:
    def is_right(value: Any) -> bool:
        if value is None:
            return optional
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return is_right, f"must be a whole number from {low} to {high}" if high < math.inf else f"must be {low} or more"


def _number(low: float, high: float) -> Check:
    def is_right(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

    return is_right, f"must be a number from {low:g} to {high:g}"


def _is_time(value: Any) -> bool:
    # The gateway's own limit, a setting, is lower.
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e6)


def _text(max_chars: int, *, optional: bool = False) -> Check:
    def is_right(value: Any) -> bool:
        return (value is None and optional) or (isinstance(value, str) and len(value) <= max_chars)

    return is_right, f"must be a string of up to {max_chars} characters"


def _is_stop(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(isinstance(each, str) and 1 <= len(each) <= 256 for each in value)
    )


_FLAG: Check = (lambda value: isinstance(value, bool), "must be true or false")
FIELDS: dict[str, Check] = {
    "context": _text(MAX_CONTEXT_CHARS),
    "suffix": _text(MAX_CONTEXT_CHARS, optional=True),
    "n_samples": _whole(1, 8),
    "length": _whole(1, 256),
    "max_time": (_is_time, "must be a number of seconds above 0"),
    "model_size": _text(128, optional=True),
    "strategy": (lambda value: value in ("sample", "idea", "predict"), "must be sample, idea or predict"),
    "min_probability": _number(0, 1),
    "temperature": _number(0, 5),
    "top_k": _whole(-1, math.inf),
    "top_p": _number(0, 1),
    "min_p": _number(0, 1),
    "max_tokens": _whole(-1, math.inf, optional=True),
    "repetition_penalty": _number(0.01, 100),
    "stop": (_is_stop, "must be a list of up to 8 strings of 1 to 256 characters"),
    "single_line": _FLAG,
    "seed": _whole(-1, math.inf, optional=True),
    "clean": _FLAG,
    "familiar_only": _FLAG,
    "explain": _whole(1, 10, optional=True),
}


NUMERIC = frozenset(
    {
        "n_samples",
        "length",
        "max_time",
        "min_probability",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "max_tokens",
        "repetition_penalty",
        "seed",
        "explain",
    }
)


def canonical_request(body: bytes) -> bytes:
    """The request under the gateway's names, with sorted members, so that equal requests are equal bytes.

    Raises:
        Refusal: it is no JSON object, or a field is unknown, missing, repeated, or out of its range.
    """
    try:
        members = json.loads(body, object_pairs_hook=_unrepeated, parse_constant=_refuse_constant, parse_float=_float)
    except (ValueError, RecursionError):
        raise _malformed("The body is not valid JSON.") from None
    if not isinstance(members, dict):
        raise _malformed('The body must be a JSON object, like {"prompt": "The old man"}.')
    fields: dict[str, Any] = {}
    is_others = bool(members.keys() & OTHERS_NAMES)
    for name, value in members.items():
        field = ALIASES.get(name, name)
        if value is None and field in FIELDS:  # as leaving it out
            continue
        if field not in FIELDS:
            if is_others:
                continue
            raise invalid(name[:40], f"is not known here; known are {', '.join(sorted(FIELDS))}, {', '.join(ALIASES)}")
        if field in fields:
            raise invalid(name, f"names {field}, which the request has already; leave one out")
        if is_others and isinstance(value, str) and field in NUMERIC:
            value = _number_in(value)
        is_right, message = FIELDS[field]
        if not is_right(value):
            raise invalid(name, message)
        fields[field] = value
    if "context" not in fields:
        raise invalid("prompt", "is missing; send the text to continue")
    text = json.dumps(fields, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    # Half of a surrogate pair is U+FFFD, as at the gateway.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _number_in(text: str) -> float | str:
    """The number that a string spells, or the string if it spells none."""
    stripped = text.strip()
    if len(stripped) > MAX_NUMBER_CHARS or not NUMBER.fullmatch(stripped):
        return text
    try:
        return int(stripped)
    except ValueError:  # it has a fraction or an exponent
        return _float(stripped)


def _float(text: str) -> float:
    """1.0 is a whole number, as at the gateway."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= MAX_EXACT else value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise _malformed("A member of the JSON object is repeated; send each name once.")
    return members


def _refuse_constant(name: str) -> Any:
    raise _malformed(f"{name} is not valid JSON.")


def _malformed(detail: str) -> Refusal:
    return Refusal(400, "invalid_json", "Invalid JSON", detail)
