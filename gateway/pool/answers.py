"""What of a worker's answer is checked before it is used: its shape and its size.

Gateway and worker are one program, of two versions at most: `shared.protocol` has the ranges of numbers, and what a
line says within its shape is believed. Lists that do not fit together would fail where no other slot can be tried, an
answer without end would fill the memory, and a name without a list would become a label of metrics. Pure; knows no
HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized

import msgspec

from shared.metrics import COUNTERS
from shared.protocol import (
    ENGINE_FAILURES,
    FINISH_REASONS,
    MAX_TYPED_TOKENS,
    Done,
    GenerateRequest,
    State,
    Tokens,
)

# Characters of a worker's sentence that are kept.
MAX_DETAIL_CHARS = 500
# Of each label of `shared.metrics.COUNTERS`. What a newer worker may count besides is UNKNOWN.
_COUNTER_LABELS: Mapping[str, frozenset[str]] = {
    "finish_reason": FINISH_REASONS | {"cancelled", "error"},
    "kind": ENGINE_FAILURES,
    "outcome": frozenset({"succeeded", "failed"}),
}
UNKNOWN = "unknown"


class InvalidAnswer(Exception):
    """A worker has sent what is no answer to its request. The text says why, and repeats nothing of it."""


def check_done(line: Done, request: GenerateRequest) -> None:
    """
    Raises:
        InvalidAnswer: the line lacks what was requested, its lists do not fit together, or it is too long.
    """
    number, num_prompt = len(line.token_ids), line.num_prompt_tokens
    if number > request.sampling.max_new_tokens + MAX_TYPED_TOKENS:
        raise InvalidAnswer("more tokens than requested")
    if line.finish_reason not in FINISH_REASONS:
        raise InvalidAnswer("an unknown finish_reason")
    _check_lengths(number, line.logprobs, line.ends)
    if request.logprobs is not None:
        _check_lengths(number, line.token_texts, line.begins, line.tops)
    if request.echo or line.prompt_ids is not None:
        _check_lengths(num_prompt, line.prompt_ids, line.prompt_token_texts, line.prompt_ends)
        if line.prompt_logprobs is not None or line.prompt_tops is not None:
            _check_lengths(num_prompt, line.prompt_logprobs, line.prompt_tops)


def check_tokens(found: Tokens) -> None:
    """
    Raises:
        InvalidAnswer: its lists do not fit together.
    """
    _check_lengths(len(found.ids), found.ends)


def _check_lengths(number: int, *lists: Sized | None) -> None:
    for each in lists:
        if each is None:
            raise InvalidAnswer("not what was requested")
        if len(each) != number:
            raise InvalidAnswer("lists of different lengths")


def usable_state(state: State) -> State:
    """A state with known counters only, because their names become labels of metrics, and a reason of bounded length.

    Counts of kinds that this gateway does not know are added up as UNKNOWN; other unknown counters are left out.
    """
    counters: dict[str, float] = {}
    for key, count in state.counters.items():
        name, _, label = key.partition(".")
        if name not in COUNTERS:
            continue
        if (label_name := COUNTERS[name][1]) is None:
            key = name
        elif label not in _COUNTER_LABELS[label_name]:
            key = f"{name}.{UNKNOWN}"
        counters[key] = counters.get(key, 0.0) + count
    return msgspec.structs.replace(state, counters=counters, reason=state.reason and shortened(state.reason))


def shortened(text: str) -> str:
    """A worker's sentence, for logs and clients."""
    return text if len(text) <= MAX_DETAIL_CHARS else f"{text[:MAX_DETAIL_CHARS]}…"
