"""The client against a worker that misbehaves: a raw socket that says exactly what a test wants."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from gateway.pool.client import MAX_LINE_BYTES, BranchError, SlotClient
from shared.plan import Slot
from shared.protocol import Accepted, Done, Failed, GenerateRequest, State, Token

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = Done(
    text=" it", token_ids=[5], logprobs=[-1.0], ends=[3], num_kept_tokens=1, finish_reason="length",
    num_prompt_tokens=1, cached_tokens=0, queue_ms=0, prefill_ms=0, decode_ms=0,
)  # fmt: skip


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def line(value: msgspec.Struct) -> bytes:
    return chunk(msgspec.json.encode(value) + b"\n")


Answer = Callable[[socket.socket], None]


def says(*parts: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return answer


def read_request(connection: socket.socket) -> None:
    """Headers and body, which come in several packets."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)


@contextmanager
def worker(path: Path, answer: Answer) -> Iterator[SlotClient]:
    """A slot's client, and behind its socket somebody who answers each request as told and hangs up."""
    address = str(path / "slot.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, suppress(OSError):  # a client may have had enough before we are done
                    read_request(connection)
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        client = SlotClient(Slot(0, "cpu", "small", address, 3), ack_s=0.2)
        try:
            yield client
        finally:
            client.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def lines(client: SlotClient) -> list[Token | Done]:
    return [line for told in client.call(GenerateRequest(prompt="a"), time.monotonic() + 5).lines() for line in told]


def test_lines_come_whole_whatever_the_chunks(short_path: Path) -> None:
    whole = msgspec.json.encode(Accepted()) + b"\n" + msgspec.json.encode(DONE) + b"\n"
    pieces = [chunk(whole[at : at + 7]) for at in range(0, len(whole), 7)]
    with worker(short_path, says(HEAD, *pieces, END)) as client:
        assert lines(client) == [DONE]


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([], "broken"),
        ([HEAD, line(Accepted())], "broken"),
        ([HEAD, line(Accepted()), chunk(b'{"event": "done"'), END], "broken"),
        ([HEAD, line(Accepted()), chunk(b"<html>\n"), END], "garbage"),
        ([HEAD, line(Accepted()), chunk(b'{"event": "done"}\n'), END], "garbage"),
        ([HEAD, line(Accepted()), chunk(b"x" * (MAX_LINE_BYTES + 1)), END], "oversize"),
        ([HEAD, line(Failed(code="engine_error", detail="d")), END], "engine_error"),
        ([b"SSH-2.0-OpenSSH\r\n"], "broken"),
        ([b"HTTP/1.1 503 X\r\nContent-Length: 35\r\n\r\n", b'{"code":"slot_full","detail":"full"}'[:35]], "refused"),
        ([b"HTTP/1.1 503 X\r\nContent-Length: 36\r\n\r\n", b'{"code":"slot_full","detail":"full"}'], "slot_full"),
        ([b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\nboom"], "refused"),
    ],
)  # fmt: skip
def test_what_a_broken_worker_says_is_told_apart(short_path: Path, parts: list[bytes], code: str) -> None:
    with worker(short_path, says(*parts)) as client, pytest.raises(BranchError) as caught:
        lines(client)
    assert caught.value.code == code
    assert caught.value.is_retryable


def test_a_refusal_that_any_slot_would_give_is_not_retried(short_path: Path) -> None:
    refusal = says(b"HTTP/1.1 422 X\r\nContent-Length: 2\r\n\r\n{}")
    with worker(short_path, refusal) as client, pytest.raises(BranchError) as caught:
        lines(client)
    assert not caught.value.is_retryable


def test_a_worker_that_does_not_acknowledge_is_given_up(short_path: Path) -> None:
    release = threading.Event()

    def answer(connection: socket.socket) -> None:
        release.wait(5)

    with worker(short_path, answer) as client:
        start = time.monotonic()
        with pytest.raises(BranchError) as caught:
            lines(client)
        release.set()
    assert caught.value.code == "not_acknowledged"
    assert time.monotonic() - start < 2


def test_after_the_acknowledgement_a_slow_answer_is_waited_for(short_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(Accepted()))
        time.sleep(0.5)  # longer than the acknowledgement may take
        connection.sendall(line(DONE) + END)

    with worker(short_path, answer) as client:
        assert lines(client) == [DONE]


def test_cancel_ends_a_call_that_waits_and_the_worker_sees_it(short_path: Path) -> None:
    hung_up = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(Accepted()) + line(Token(text="x", token_id=1, logprob=-1.0)))
        if connection.recv(1) == b"":
            hung_up.set()

    with worker(short_path, answer) as client:
        call = client.call(GenerateRequest(prompt="a"), time.monotonic() + 30)
        answers = call.lines()
        assert isinstance(next(answers)[0], Token)
        threading.Timer(0.05, call.cancel).start()
        with pytest.raises(BranchError) as caught:
            next(answers)
        assert caught.value.code == "cancelled"
        assert hung_up.wait(2)


# httpcore leaves the closing of a socket that could not connect to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_slot_without_a_worker(short_path: Path) -> None:
    client = SlotClient(Slot(0, "cpu", "small", str(short_path / "none.sock"), 3), ack_s=0.2)
    with pytest.raises(BranchError):
        lines(client)
    with pytest.raises(BranchError):
        next(client.states())
    client.close()


def test_states_come_as_they_are_said(short_path: Path) -> None:
    states = [State(state="loading", progress=0.5), State(state="warm", ms_per_token=2.0)]
    with worker(short_path, says(HEAD, *map(line, states), END)) as client:
        assert list(client.states()) == states


def test_a_connection_serves_one_call_after_another(short_path: Path) -> None:
    num_answered = 0

    def answer(connection: socket.socket) -> None:
        nonlocal num_answered
        connection.sendall(HEAD + line(Accepted()) + line(DONE) + END)
        num_answered += 1
        if num_answered < 3:
            read_request(connection)  # on the same connection, or this waits in vain
            answer(connection)

    with worker(short_path, answer) as client:
        assert [lines(client) for _ in range(3)] == [[DONE]] * 3
    assert num_answered == 3


@pytest.mark.parametrize("head", [HEAD, HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")])
def test_a_connection_that_its_worker_has_closed_is_not_used_again(short_path: Path, head: bytes) -> None:
    with worker(short_path, says(head + line(Accepted()) + line(DONE) + END)) as client:
        assert [lines(client) for _ in range(3)] == [[DONE]] * 3


def test_what_follows_the_answer_ends_the_connection(short_path: Path) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(Accepted()) + line(DONE) + END + b"HTTP/1.1 200")
        assert connection.recv(1) == b""

    with worker(short_path, answer) as client:
        assert lines(client) == [DONE]


def test_a_header_is_one_line(short_path: Path) -> None:
    with worker(short_path, says(HEAD + line(DONE) + END)) as client:
        call = client.call(GenerateRequest(prompt="a", request_id="a\r\nX-Other: b"), time.monotonic() + 5)
        with pytest.raises(BranchError, match="line break"):
            list(call.lines())
        assert lines(client) == [DONE]
