"""What a worker may answer, changed anywhere: the client gets one answer, and labels of metrics have listed values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.pool.answers import MAX_DETAIL_CHARS, usable_state
from shared import wire
from shared.cancellation import HangupWatcher
from shared.protocol import Done, GenerateRequest, State, Token
from tests.gateway.api.conftest import Api
from tests.gateway.exposition import samples
from tests.gateway.generation.stubs import MakePool, Raw, completion

# The codes of failed calls.
CODES = (
    {"broken", "cancelled", "failed", "garbage", "not_acknowledged", "oversize", "refused", "timeout", "unreachable"}
    | wire.FAILURE_CODES
    | wire.REFUSAL_CODES
)
TEXT = " the sea was calm."
# Of each dialect, what shows most of a worker's answer.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/autocomplete", {"context": "He saw", "length": 5}),
    ("/autocomplete", {"context": "He saw", "length": 5, "stream": True, "explain": 3}),
    ("/v1/completions", {"prompt": "He saw", "max_tokens": 5, "echo": True, "logprobs": 2, "n": 2}),
    ("/v1/completions", {"prompt": "He saw", "max_tokens": 5, "stream": True, "logprobs": 2}),
    ("/generate", {"inputs": "He saw", "parameters": {"max_new_tokens": 5, "details": True, "top_n_tokens": 2}}),
    ("/generate_stream", {"inputs": "He saw", "parameters": {"max_new_tokens": 5, "details": True}}),
]
FIELDS = sorted({"event", *Token.__struct_fields__, *Done.__struct_fields__})
MISSING = object()
_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.sampled_from(["eos", "warm", 10**30])
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def changes(draw: st.DrawFn) -> Callable[[Any], Any]:
    """A change of one value: another or none, or of a list one item more, less or other, or another order."""
    new, how = draw(_values | st.just(MISSING)), draw(st.sampled_from(["new", "shorter", "longer", "item", "reversed"]))

    def changed(value: Any) -> Any:
        if not isinstance(value, list) or not value or how == "new":
            return new
        return {
            "shorter": value[:-1],
            "longer": [*value, value[-1]],
            "item": [None if new is MISSING else new, *value[1:]],
            "reversed": value[::-1],
        }[how]

    return changed


def changed_lines(request: GenerateRequest, field: str, change: Callable[[Any], Any]) -> bytes:
    """The lines of a right answer, with one field of each changed that has it."""
    lines = []
    for line in map(msgspec.to_builtins, completion(request, TEXT)):
        if request.echo and line["event"] == "done":
            number = len(line["prompt_ids"])
            line |= {"prompt_logprobs": [None] * number, "prompt_tops": [None] * number}
        if field in line and (field != "event" or line["event"] == "done"):
            line[field] = change(line[field])
            if line[field] is MISSING:
                del line[field]
        lines.append(json.dumps(line).encode("utf-8", "surrogatepass") + b"\n")
    return b"".join(lines)


def test_an_answer_with_one_field_changed_is_one_answer_to_the_client(
    make_pool: MakePool, hangups: HangupWatcher
) -> None:
    """In time, well-formed, and a 200 unless the change was noticed; of one worker or of both."""
    field, num_wrong = "", 0
    change: Callable[[Any], Any] = str

    def wrong(request: GenerateRequest) -> Iterator[Raw]:
        yield Raw(changed_lines(request, field, change))

    def right_or_wrong(request: GenerateRequest) -> Iterator[Any]:
        yield from wrong(request) if num_wrong == 2 else completion(request, TEXT)

    api = Api(make_pool(wrong, right_or_wrong, num_retries=10**6, max_batch=16), hangups)

    @settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
    @given(asked=st.sampled_from(REQUESTS), name=st.sampled_from(FIELDS), new=changes(), number=st.sampled_from([1, 2]))
    @example(REQUESTS[2], "prompt_tops", lambda tops: tops[1:], 2)
    @example(REQUESTS[4], "finish_reason", lambda _: "x" * 999, 2)
    @example(REQUESTS[4], "prompt_logprobs", lambda _: [0.5], 1)
    @example(REQUESTS[4], "prompt_token_texts", lambda _: ["a"], 1)
    def one_answer(asked: tuple[str, dict[str, Any]], name: str, new: Any, number: int) -> None:
        nonlocal field, change, num_wrong
        field, change, num_wrong = name, new, number
        with capture_logs() as logs:
            answer = api.post(*asked)
        assert answer.status_code in {200} | ({503, 424} if number == 2 else set())  # 424 is the TGI dialect's
        assert not [entry for entry in logs if entry["event"] == "unhandled_exception"]
        parts = [line.removeprefix("data:") for line in answer.text.splitlines() if line.startswith("data:")]
        assert [json.loads(part) for part in parts or [answer.text] if part != " [DONE]"]

    one_answer()
    api.pool.wait_until_idle()
    outcomes = {outcome for outcome, _slot in samples(api.pool.metrics, "tercet_branches_total")}
    assert "garbage" in outcomes
    assert outcomes <= CODES | {"ok"}


def test_a_state_has_known_counters_and_a_reason_of_bounded_length() -> None:
    counters: dict[str, float] = {
        "failures.hang": 1,
        "failures.x": 2,
        "failures.y": 3,
        "sequences.eos": 4,
        "prompt_tokens.z": 5,
        "w": 6,
    }
    state = usable_state(State(state="warm", counters=counters, reason="r" * 9999))
    assert state.counters == {"failures.hang": 1, "failures.unknown": 5, "sequences.eos": 4, "prompt_tokens": 5}
    assert len(state.reason or "") == MAX_DETAIL_CHARS + 1
