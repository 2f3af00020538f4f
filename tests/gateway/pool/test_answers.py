"""What a worker may answer: a line that cannot be true is refused, whatever is wrong with it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.pool.access import RemoteAccess
from gateway.pool.answers import MAX_DETAIL_CHARS, AnswerCheck, InvalidAnswer, usable_state
from gateway.pool.client import BranchError, SlotClient
from shared import wire
from shared.plan import Remote, Slot
from shared.protocol import (
    MAX_TYPED_TOKENS,
    Accepted,
    Done,
    Failed,
    GenerateRequest,
    Sampling,
    State,
    Token,
    TokenizeResponse,
    Tokens,
    Top,
)
from tests.gateway.generation.stubs import make_done
from tests.gateway.pool.helpers import END, HEAD, Server, chunk, serving_requests

VOCAB_SIZE = 500
REQUEST = GenerateRequest(
    prompt_ids=[3, 4], sampling=Sampling(max_new_tokens=3), stream=True, heal=True, echo=True, logprobs=2
)
TEXTS = [" it", " was", "é"]
TOPS = [[Top(1, " a", -0.5), Top(2, " b", -1.0)]] * 3
TOKEN = Token(text=" it", token_id=1, logprob=-1.0, token_text=" it", begin=0, tops=TOPS[0])
DONE = make_done(
    TEXTS,
    token_texts=TEXTS,
    tops=TOPS,
    num_prompt_tokens=2,
    prompt_text="ab",
    prompt_ids=[3, 4],
    prompt_token_texts=["a", "b"],
    prompt_ends=[1, 2],
    prompt_logprobs=[None, -1.0],
    prompt_tops=[None, TOPS[0]],
)
LIES: list[dict[str, Any]] = [
    {"token_ids": [1, 2]},
    {"logprobs": [-1.0] * 4},
    {"ends": [3, 7]},
    {"ends": [7, 3, 8]},
    {"ends": [3, 7, 9]},
    {"ends": [3, 7, 7]},
    {"text": DONE.text + " and more"},
    {"num_kept_tokens": 4},
    {"num_typed_tokens": 4},
    {"num_typed_tokens": 2, "num_kept_tokens": 1},
    {"token_ids": [1, 2, VOCAB_SIZE]},
    {"finish_reason": "cancelled"},
    {"finish_reason": "x" * 99},
    {"num_prompt_tokens": 1},
    {"num_prompt_tokens": 10_000},
    {"cached_tokens": 10_000},
    {"token_texts": None},
    {"token_texts": TEXTS[:2]},
    {"begins": None},
    {"begins": [0, 3]},
    {"begins": [0, 7, 3]},
    {"begins": [0, 3, 999]},
    {"tops": None},
    {"tops": TOPS[:2]},
    {"tops": [*TOPS[:2], TOPS[0] * 2]},
    {"tops": [[Top(VOCAB_SIZE, "", -1.0)]] * 3},
    {"prompt_text": None},
    {"prompt_ids": [3]},
    {"prompt_ids": [3, 5]},
    {"prompt_token_texts": ["a"]},
    {"prompt_ends": [2, 1]},
    {"prompt_ends": [1, 3]},
    {"prompt_logprobs": None},
    {"prompt_logprobs": [None, None]},
    {"prompt_tops": [None, None]},
    {"prompt_tops": [None]},
]


def check(request: GenerateRequest = REQUEST) -> AnswerCheck:
    return AnswerCheck(request, VOCAB_SIZE)


def changed(line: Done, **fields: Any) -> Done:
    return msgspec.structs.replace(line, **fields)


def test_an_answer_with_all_that_was_requested_is_accepted_unchanged() -> None:
    answer, done = check(), msgspec.json.decode(msgspec.json.encode(DONE), type=Done)
    for _ in TEXTS:
        answer.token(TOKEN)
    answer.done(done)
    assert done == DONE


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_a_done_line_that_cannot_be_true_is_refused(lie: dict[str, Any]) -> None:
    with pytest.raises(InvalidAnswer):
        check().done(changed(DONE, **lie))


@pytest.mark.parametrize(
    "change",
    [
        {"token_id": VOCAB_SIZE},
        {"token_text": None},
        {"begin": None},
        {"tops": None},
        {"tops": TOPS[0] * 2},
        {"tops": [Top(VOCAB_SIZE, "", -1.0)]},
    ],
    ids=str,
)
def test_a_token_that_cannot_be_true_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidAnswer):
        check().token(msgspec.structs.replace(TOKEN, **change))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("token_ids", value) for value in ([-1, 2, 3], [2**40, 2, 3])),
        *(("logprobs", value) for value in ([-1e39, -1.0, -1.0], [5.0, -1.0, -1.0])),
        *((name, -1) for name in ("ends", "begins", "num_kept_tokens", "num_prompt_tokens", "cached_tokens")),
        *((name, value) for name in ("queue_ms", "prefill_ms", "decode_ms") for value in (-1.0, 1e300)),
        *((name, 1e300) for name in ("usefulness", "fit")),
    ],
)
def test_a_number_that_cannot_be_is_no_line(field: str, value: Any) -> None:
    if field in {"ends", "begins"}:
        value = [value, 3, 8]
    with pytest.raises(msgspec.ValidationError):
        wire.decode_line(wire.encode_line(changed(DONE, **{field: value})))


def test_more_tokens_than_requested_are_refused() -> None:
    """Those that only reproduce typed text do not count, but are bounded too."""
    answer = check()
    for _ in range(3):
        answer.token(TOKEN)
    with pytest.raises(InvalidAnswer, match="more tokens than requested"):
        answer.token(TOKEN)
    for num_typed, is_valid in ((0, False), (1, True), (MAX_TYPED_TOKENS + 1, False)):
        number = 3 + max(1, num_typed)
        done = changed(
            make_done(["a"] * number, token_texts=["a"] * number, tops=[[]] * number),
            num_typed_tokens=num_typed,
            num_prompt_tokens=2,
            **{name: getattr(DONE, name) for name in Done.__struct_fields__ if name.startswith("prompt_")},
        )
        if is_valid:
            check().done(done)
        else:
            with pytest.raises(InvalidAnswer, match="more tokens than requested"):
                check().done(done)


def test_nothing_may_follow_the_last_line() -> None:
    answer = check()
    answer.done(DONE)
    with pytest.raises(InvalidAnswer):
        answer.done(DONE)
    with pytest.raises(InvalidAnswer):
        answer.token(TOKEN)


def test_tokens_of_an_answer_that_is_not_streamed_are_refused() -> None:
    with pytest.raises(InvalidAnswer):
        check(msgspec.structs.replace(REQUEST, stream=False)).token(TOKEN)


def test_what_was_not_requested_is_removed() -> None:
    """A worker of another version may send more; it is not looked at."""
    line, token = changed(DONE, tops=[[Top(VOCAB_SIZE, "", 0.0)]]), msgspec.structs.replace(TOKEN)
    answer = check(GenerateRequest(prompt="He", stream=True))
    answer.token(token)
    answer.done(line)
    assert token == Token(text=" it", token_id=1, logprob=-1.0)
    assert line == make_done(TEXTS, num_prompt_tokens=2)


def test_the_bounds_follow_from_the_request() -> None:
    plain = check(GenerateRequest(prompt="He", sampling=Sampling(max_new_tokens=20)))
    assert plain.max_line_bytes == plain.max_bytes < 100_000
    assert check(GenerateRequest(prompt="He", stream=True)).max_bytes == 2 * plain.max_bytes
    long = GenerateRequest(prompt="He " * 1000)
    assert check(long).max_bytes == plain.max_bytes
    assert check(msgspec.structs.replace(long, echo=True)).max_bytes > 1_000_000
    assert check(msgspec.structs.replace(long, echo=True, max_prompt_tokens=1)).max_bytes < 100_000


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


# The wire, fuzzed --------------------------------------------------------------------------------

CODES = (
    {"broken", "cancelled", "failed", "garbage", "not_acknowledged", "oversize", "refused", "timeout", "unreachable"}
    | wire.FAILURE_CODES
    | wire.REFUSAL_CODES
)
TOKENS = TokenizeResponse(ids=[5, 6], texts=["a", " b"], ends=[1, 3], n_ctx=1024, eos_id=0)
VALID = [Accepted(), TOKEN, DONE, Failed(code="hang", detail="d"), State(state="warm", counters={"restarts": 1})]
_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.sampled_from(["eos", "warm", 10**30])
)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """A line of any kind, with some of its fields changed or missing, or bytes changed."""
    fields = msgspec.to_builtins(draw(st.sampled_from([*VALID, TOKENS])))
    for name in draw(st.lists(st.sampled_from([*fields, "new"]), max_size=3)):
        if draw(st.booleans()):
            fields[name] = draw(_values)
        else:
            fields.pop(name, None)
    data = bytearray(msgspec.json.encode(fields) if _is_encodable(fields) else b"[" * 100_000)
    for at in draw(st.lists(st.integers(0, len(data) - 1), max_size=2)):
        data[at] = draw(st.integers(0, 255))
    return bytes(data) + b"\n" * draw(st.sampled_from([1, 1, 1, 0, 3]))


def _is_encodable(fields: dict[str, Any]) -> bool:
    try:
        msgspec.json.encode(fields)
    except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError):
        return False
    return True


def generate(client: SlotClient) -> object:
    return [
        line for batch in client.call(REQUEST, time.monotonic() + 5, vocab_size=VOCAB_SIZE).lines() for line in batch
    ]


ACTS: list[Callable[[SlotClient], object]] = [
    generate,
    lambda client: list(client.states()),
    lambda client: client.tokenize("a b", 5.0).result(),
]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.lists(lines(), max_size=4), act=st.sampled_from(ACTS), status=st.sampled_from([200, 200, 200, 422, 503]))
def test_whatever_a_worker_sends_is_an_answer_or_a_failure_of_a_listed_code(
    body: list[bytes], act: Callable[[SlotClient], object], status: int
) -> None:
    def answer(connection: socket.socket, _request: bytes) -> None:
        parts = [chunk(part) for part in body if part]
        connection.sendall(b"".join([HEAD.replace(b"200", b"%d" % status), *parts, END]))

    with serving_requests(answer) as server:
        client = _client(server)
        found = _outcome(client, act)
        client.close()
    if isinstance(found, BranchError):
        assert found.code in CODES
        assert len(found.detail) <= MAX_DETAIL_CHARS + 100
    else:
        _check(found)


def _outcome(client: SlotClient, act: Callable[[SlotClient], object]) -> object:
    try:
        return act(client)
    except BranchError as error:
        return error


def _client(server: Server) -> SlotClient:
    host, _, port = server.address.partition(":")
    slot = Slot(0, "", "small", "", 0, remote=Remote("http", host, host, int(port), ""))
    return SlotClient(slot, 5.0, RemoteAccess(None, None))


def _check(found: object) -> None:
    if isinstance(found, Tokens):
        assert len(found.ids) == len(found.ends)
        return
    assert isinstance(found, list)
    for line in found:
        if isinstance(line, State):
            assert set(line.counters) <= {"restarts"}
        elif isinstance(line, Done):
            assert line.token_texts is not None
            assert len(line.token_ids) == len(line.token_texts) == len(line.ends) <= 3 + MAX_TYPED_TOKENS
            assert line.ends == sorted(line.ends)
