"""The slot client against real sockets whose server misbehaves in every way a worker can."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.pool import client as client_module
from gateway.pool.client import BranchError, SlotClient
from shared.plan import Slot
from shared.protocol import (
    MAX_TYPED_TOKENS,
    Accepted,
    Done,
    Failed,
    GenerateRequest,
    State,
    Token,
    TokenizeRequest,
    TokenizeResponse,
    Tokens,
    Top,
)
from shared.time_margins import MARGINS
from shared.wire import MAX_LINE_BYTES, MAX_REFUSAL_BYTES, MAX_STATE_BYTES
from tests.gateway.generation.stubs import make_done
from tests.gateway.pool.helpers import (
    DONE,
    END,
    HEAD,
    Answer,
    Server,
    chunk,
    line,
    sends,
    sends_to_each,
    serving,
)

ACK_S = 0.2
MIB = 1 << 20
REQUEST = GenerateRequest(prompt="a", stream=True)
TOKEN = Token(text="x", token_id=1, logprob=-1.0)


@contextmanager
def worker(path: Path, answer: Answer, *, ack_s: float = 5.0) -> Iterator[tuple[SlotClient, Server]]:
    """A worker that answers so, and its client, which waits `ack_s` for an acknowledgement: long on a busy machine."""
    with serving(path, answer) as server:
        client = SlotClient(Slot(0, "cpu", "small", server.address, 3), ack_s)
        try:
            yield client, server
        finally:
            client.close()


def read_lines(client: SlotClient, *, attempt: int = 1, timeout_s: float = 5.0) -> list[Token | Done]:
    call = client.call(REQUEST, time.monotonic() + timeout_s, attempt)
    return [line for batch in call.lines() for line in batch]


def test_the_request_carries_the_branch_and_lines_are_whole_whatever_the_chunks(short_path: Path) -> None:
    sent = GenerateRequest(prompt="a", seed=7, request_id="r-1")
    whole = msgspec.json.encode(Accepted()) + b"\n" + msgspec.json.encode(DONE) + b"\n"
    pieces = [chunk(whole[at : at + 7]) for at in range(0, len(whole), 7)]
    with worker(short_path, sends(HEAD, *pieces, END)) as (client, server):
        assert list(client.call(sent, time.monotonic() + 5).lines()) == [[DONE]]
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /generate HTTP/1.1\r\n")
    assert b"x-request-id: r-1" in head.lower()
    assert msgspec.json.decode(body, type=GenerateRequest) == sent


def response(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def watch(client: SlotClient) -> object:
    return list(client.states())


def ask_state(client: SlotClient) -> object:
    return client.state(1.0)


def tokenize(client: SlotClient, *, timeout_s: float = 5.0) -> object:
    return client.tokenize("a b", timeout_s).result()


TOKENS = TokenizeResponse(ids=[5, 6], texts=["a", " b"], ends=[1, 3], n_ctx=1024, eos_id=0)
FOUND_TOKENS = Tokens(ids=[5, 6], ends=[1, 3], n_ctx=1024, eos_id=0)
WRONG_TOKENS: list[dict[str, Any]] = [
    *({"ids": ids} for ids in ([5], [-5, 6])),
    *({name: value} for name, value in (("n_ctx", -5), ("eos_id", -1), ("eos_token", "x" * 1100))),
]
OUT_OF_RANGE: list[dict[str, Any]] = [
    *({name: -1} for name in ("n_ctx", "vocab_size", "max_batch", "num_gateways", "ms_per_token", "pid")),
    *({name: 10**9} for name in ("n_ctx", "max_batch")),
    *({"counters": {"restarts": number}} for number in (-1, 1e300)),
    *({name: value} for name, value in (("ms_per_token", 1e300), ("progress", 2.0), ("revision", "r" * 2000))),
]
FULL = b'{"code":"slot_full","detail":"full"}'


@pytest.mark.parametrize(
    ("act", "parts", "code"),
    [
        (read_lines, [], "broken"),
        (read_lines, [HEAD, line(Accepted()), chunk(b'{"event": "done"'), END], "broken"),
        (read_lines, [HEAD, line(Accepted()), chunk(b"<html>\n"), END], "garbage"),
        (read_lines, [HEAD, line(Accepted()), chunk(b'{"event": "done"}\n'), END], "garbage"),
        (read_lines, [HEAD, chunk(b'{"event": "secret"}\n'), END], "garbage"),
        (read_lines, [HEAD, line(Accepted()), chunk(b"x" * (MAX_LINE_BYTES + 1)), END], "oversize"),
        (read_lines, [HEAD, line(Failed(code="device_error", detail="d")), END], "device_error"),
        (read_lines, [HEAD, line(Failed(code="new", detail="d")), END], "failed"),
        (read_lines, [HEAD, line(Accepted()), *[line(TOKEN)] * 21], "garbage"),
        (read_lines, [HEAD, line(Accepted()), chunk(b"[" * 20_000 + b"\n"), END], "garbage"),
        (read_lines, [HEAD, line(Accepted()), chunk(b'{"event":"done","text":"\xff"}\n'), END], "garbage"),
        (read_lines, [HEAD, line(make_done(["a"] * (21 + MAX_TYPED_TOKENS))), END], "garbage"),
        (read_lines, [HEAD, *[chunk(b'{"event":"accepted","x":"%s"}\n' % (b"x" * MIB))] * 17], "oversize"),
        (read_lines, [b"HTTP/1.1 200 OK\r\n", b"X: secret\r\n" * 10_000], "broken"),
        (read_lines, [HEAD, b"1;" + b"secret" * 50_000], "broken"),
        (read_lines, [b"SSH-2.0-OpenSSH\r\n"], "broken"),
        (read_lines, [response(FULL[:-1], 503)], "refused"),
        (read_lines, [response(FULL, 503)], "slot_full"),
        (read_lines, [response(b"boom", 500)], "refused"),
        (read_lines, [response(b'{"code":"new","detail":"d"}', 503)], "refused"),
        (read_lines, [response(b'{"code":["slot_full"],"detail":{}}', 503)], "refused"),
        (read_lines, [response(b"[" * 20_000, 503)], "refused"),
        (read_lines, [response(b"x" * (MAX_REFUSAL_BYTES + 1), 503)], "oversize"),
        (watch, [HEAD, line(State(state="warm"))], "unreachable"),
        (watch, [HEAD, line(State(state="warm")), chunk(b'{"state": "asleep"}\n'), END], "garbage"),
        (watch, [HEAD, line(State(state="warm", model="m" * MAX_STATE_BYTES))], "oversize"),
        *((watch, [HEAD, line(State(state="warm", **range_)), END], "garbage") for range_ in OUT_OF_RANGE),
        (watch, [response(b"", 404)], "refused"),
        (ask_state, [HEAD + END], "broken"),
        (tokenize, [], "broken"),
        (tokenize, [response(b'{"ids": [1]}')], "garbage"),
        (tokenize, [response(b"x" * 3000)], "oversize"),
        *(
            (tokenize, [response(msgspec.json.encode(msgspec.structs.replace(TOKENS, **wrong)))], "garbage")
            for wrong in WRONG_TOKENS
        ),
        (tokenize, [response(b'{"code":"not_ready","detail":"d"}', 503)], "not_ready"),
        (tokenize, [response(b'{"code":"invalid_request","detail":"d"}', 422)], "invalid_request"),
    ],
)
def test_each_failure_has_its_code_and_repeats_nothing_that_was_sent(
    short_path: Path,
    act: Callable[[SlotClient], object],
    parts: list[bytes],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "MAX_TOKENIZE_BYTES", 2000)
    with worker(short_path, sends(*parts)) as (client, _), pytest.raises(BranchError) as caught:
        act(client)
    assert caught.value.code == code
    # A text that a worker has begun may be what ended it.
    is_begun = act is tokenize and code != "not_ready"
    assert caught.value.is_retryable == (code != "invalid_request" and not is_begun)
    assert "secret" not in caught.value.detail


def test_the_time_to_acknowledge_doubles_with_each_attempt(short_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        time.sleep(1.5 * ACK_S)
        connection.sendall(HEAD + line(Accepted()) + line(DONE) + END)

    with worker(short_path, answer, ack_s=ACK_S) as (client, _):
        start = time.monotonic()
        with pytest.raises(BranchError, match=r"within 0\.2 s") as caught:
            read_lines(client)
        assert ACK_S <= time.monotonic() - start < 2
        assert caught.value.code == "not_acknowledged"
        assert read_lines(client, attempt=3) == [DONE]


def test_after_the_acknowledgement_a_slow_response_is_awaited(short_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(Accepted()))
        time.sleep(1.5 * ACK_S)
        connection.sendall(line(DONE) + END)

    with worker(short_path, answer, ack_s=ACK_S) as (client, _):
        assert read_lines(client) == [DONE]


@pytest.fixture
def silence_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """A shorter silence than the product's, after which a worker counts as down."""
    monkeypatch.setattr(client_module, "MARGINS", replace(MARGINS, silence_s=0.3))
    return 0.3


def test_a_worker_that_sends_nothing_past_the_deadline_times_out(short_path: Path, silence_s: float) -> None:
    release = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(Accepted()))
        release.wait(10)

    with worker(short_path, answer) as (client, _):
        start = time.monotonic()
        with pytest.raises(BranchError) as caught:
            read_lines(client, timeout_s=0.1)
        took_s = time.monotonic() - start
        release.set()
    assert caught.value.code == "timeout"
    assert 0.1 + silence_s <= took_s < MARGINS.silence_s


def test_abort_ends_every_call_of_the_slot_with_its_reason(short_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(Accepted()) + line(TOKEN))
        connection.recv(1)

    with worker(short_path, answer) as (client, _), ThreadPoolExecutor() as pool:
        calls = [client.call(REQUEST, time.monotonic() + 30, attempt=5).lines() for _ in range(3)]
        assert [next(lines) for lines in calls] == [[TOKEN]] * 3
        ends = [pool.submit(next, lines) for lines in calls]
        client.abort_calls(BranchError("slot_lost", "Its worker was lost."))
        for end in ends:
            with pytest.raises(BranchError) as caught:
                end.result(5)
            assert (caught.value.code, caught.value.is_retryable) == ("slot_lost", True)


def test_abort_leaves_later_calls_alone(short_path: Path) -> None:
    with worker(short_path, sends_to_each(HEAD + line(Accepted()) + line(DONE) + END)) as (client, _):
        assert read_lines(client) == [DONE]
        client.abort_calls(BranchError("slot_lost", "Its worker was lost."))
        assert read_lines(client) == [DONE]


def test_a_slot_without_a_worker(short_path: Path) -> None:
    client = SlotClient(Slot(0, "cpu", "small", str(short_path / "none.sock"), 3), ACK_S)
    with pytest.raises(BranchError) as caught:
        read_lines(client)
    assert caught.value.code == "no_socket"
    with pytest.raises(BranchError) as caught:
        next(client.states())
    assert caught.value.code == "unreachable"
    client.close()


def test_one_state_is_asked_for_without_a_stream(short_path: Path) -> None:
    body = msgspec.json.encode(State(state="warm")) + b"\n"
    with worker(short_path, sends(response(body))) as (client, server):
        assert client.state(1.0) == State(state="warm")
    assert server.requests[0].startswith(b"GET /state?once HTTP/1.1\r\n")


def test_data_after_the_response_closes_the_connection(short_path: Path) -> None:
    is_closed = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(Accepted()) + line(DONE) + END + b"HTTP/1.1 200")
        if connection.recv(1) == b"":
            is_closed.set()

    with worker(short_path, answer) as (client, _):
        assert read_lines(client) == [DONE]
        assert is_closed.wait(5)


def test_tokens_of_a_text(short_path: Path) -> None:
    with worker(short_path, sends_to_each(response(msgspec.json.encode(TOKENS)))) as (client, server):
        assert [client.tokenize(text, 5.0).result() for text in ("a 🦉", "a b")] == [FOUND_TOKENS] * 2
    assert server.num_connections == 1
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /tokenize HTTP/1.1\r\n")
    assert msgspec.json.decode(body, type=TokenizeRequest) == TokenizeRequest(text="a 🦉")


@pytest.mark.usefixtures("silence_s")
@pytest.mark.parametrize(
    ("act", "beginning", "part", "code"),
    [
        (read_lines, b"HTTP/1.1 200 OK\r\nX: ", b"x", "not_acknowledged"),
        (read_lines, HEAD + line(Accepted()) + b"1;", b"x", "timeout"),
        (watch, HEAD + line(State(state="warm")), chunk(b" "), "unreachable"),
        (tokenize, b"HTTP/1.1 200 X\r\nContent-Length: 999\r\n\r\n", b"x", "timeout"),
    ],
    ids=["head", "chunk", "states", "tokens"],
)
def test_a_call_ends_in_time_even_if_bytes_keep_coming(
    short_path: Path,
    act: Callable[..., object],
    beginning: bytes,
    part: bytes,
    code: str,
) -> None:
    """They are not the next line, so no silence shows it."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(beginning)
        while True:
            connection.sendall(part)
            time.sleep(0.01)

    begin = time.monotonic()
    with worker(short_path, drip, ack_s=0.5) as (client, _), pytest.raises(BranchError) as caught:
        act(client, **({} if act is watch else {"timeout_s": 0.5}))
    assert caught.value.code == code
    assert 0.25 < time.monotonic() - begin < 5


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_cancelled_call_sends_nothing_or_ends_with_the_acknowledgement(short_path: Path, has_begun: bool) -> None:
    def answer(connection: socket.socket) -> None:
        call.cancel()
        connection.sendall(HEAD + line(Accepted()))
        connection.recv(1)

    with worker(short_path, answer) as (client, server):
        call = client.call(GenerateRequest(prompt="a"), time.monotonic() + 30)
        if not has_begun:
            call.cancel()
        with pytest.raises(BranchError) as caught:
            next(call.lines())
    assert (caught.value.code, caught.value.is_retryable) == ("cancelled", False)
    assert server.num_connections == has_begun


def test_the_largest_line_that_a_worker_can_send_is_read(short_path: Path) -> None:
    """20 likely tokens at each of 1,024 positions, all of them as long as GPT-2's longest, in characters to escape."""
    top = [Top(50256, "\\" * 128, -12.345678901234567)] * 20
    largest = msgspec.structs.replace(
        DONE,
        token_texts=[" it"],
        begins=[0],
        tops=[[]],
        num_prompt_tokens=1024,
        prompt_text="\\" * 128 * 1024,
        prompt_ids=[50256] * 1024,
        prompt_ends=[128 * (k + 1) for k in range(1024)],
        prompt_token_texts=["\\" * 128] * 1024,
        prompt_logprobs=[None, *[-12.345678901234567] * 1023],
        prompt_tops=[None, *[top] * 1023],
    )
    request = GenerateRequest(prompt_ids=[50256] * 1024, echo=True, logprobs=20)
    with worker(short_path, sends(HEAD, line(Accepted()), line(largest), END)) as (client, _):
        assert list(client.call(request, time.monotonic() + 5).lines()) == [[largest]]
