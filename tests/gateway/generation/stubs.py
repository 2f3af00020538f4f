"""A pool of stub workers: real HTTP on Unix sockets, with completions that a test writes instead of a model's.

Every response closes its connection, so that none stays open when the test ends while a branch reads its last bytes.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from gateway.generation.fanout import Fanout
from gateway.generation.request import Caller, GenerationSpec
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from gateway.pool.client import SlotClient
from gateway.pool.retries import RetryBudget
from shared.plan import Model, Plan, make_slots
from shared.protocol import (
    PROTOCOL,
    Accepted,
    Done,
    Failed,
    GenerateLine,
    GenerateRequest,
    Sampling,
    State,
    Token,
    TokenizeResponse,
    Top,
)
from shared.wire import parse_generate_request, parse_tokenize_request
from tests.e2e.harness import until
from tests.gateway.exposition import total


@dataclass(frozen=True)
class Refusal:
    """A whole response instead of lines."""

    status: int
    code: str


@dataclass(frozen=True)
class Together:
    """The last lines of a response, in one chunk."""

    lines: Sequence[GenerateLine]


@dataclass(frozen=True)
class Raw:
    """A chunk that is not a line of the protocol; the last of a response."""

    data: bytes


class Break:
    """Close the connection."""


class Hang:
    """Send nothing more until the gateway hangs up."""


Step: TypeAlias = GenerateLine | Together | Raw | Refusal | Break | Hang
Respond: TypeAlias = Callable[[GenerateRequest], Iterable[Step]]
# The tokens of a text, or the code of a refusal.
Tokenize: TypeAlias = Callable[[str], TokenizeResponse | str]


def token_texts(text: str) -> list[str]:
    """A word with the space before it, punctuation by itself."""
    return re.findall(r" ?\w+| ?[^\w\s]+|\s", text)


def make_done(texts: Sequence[str], **fields: Any) -> Done:
    """The last line of a completion with these tokens; `fields` replace any of the line's."""
    defaults: dict[str, Any] = {
        "text": "".join(texts),
        "token_ids": list(range(len(texts))),
        "logprobs": [-1.0] * len(texts),
        "ends": list(accumulate(map(len, texts))),
        "num_kept_tokens": len(texts),
        "finish_reason": "eos",
        "num_prompt_tokens": 4,
        "cached_tokens": 2,
        "queue_ms": 0.5,
        "prefill_ms": 1.0,
        "decode_ms": 2.0,
    }
    if fields.get("token_texts") is not None:
        defaults["begins"] = list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)]
    return Done(**(defaults | fields))


def completion(
    request: GenerateRequest, text: str, *, logprob: float = -1.0, finish_reason: str = "eos"
) -> Iterator[GenerateLine]:
    """What a worker sends for a completion: of the text, as many tokens as are requested."""
    yield Accepted()
    texts = token_texts(text)[: request.sampling.max_new_tokens]
    has_scores = request.logprobs is not None
    tops = [[Top(0, token_text, logprob)][: request.logprobs] for token_text in texts]
    if request.stream:
        for token_id, token_text in enumerate(texts):
            line = Token(text=token_text, token_id=token_id, logprob=logprob)
            if has_scores:
                line.token_text, line.begin, line.tops = token_text, len("".join(texts[:token_id])), tops[token_id]
            yield line
    prompt = token_texts(request.prompt or "")
    echo = {
        "prompt_text": "".join(prompt),
        "prompt_ids": list(range(len(prompt))),
        "prompt_token_texts": prompt,
        "prompt_ends": list(accumulate(map(len, prompt))),
        "num_prompt_tokens": len(prompt),
    }
    yield make_done(
        texts,
        logprobs=[logprob] * len(texts),
        finish_reason=finish_reason,
        token_texts=texts if has_scores else None,
        tops=tops if has_scores else None,
        **(echo if request.echo else {}),
    )


TEXTS = [" the sea was calm.", " a gull flying over", " nothing but sand"]
LOGPROBS = [-3.0, -1.0, -2.0]


def three_texts(request: GenerateRequest) -> Iterator[Step]:
    """Completes with one of three texts."""
    number = request.seed % 3
    yield from completion(request, TEXTS[number], logprob=LOGPROBS[number])


def hang(request: GenerateRequest) -> Iterator[Step]:
    """Accepts the request, then sends nothing more."""
    yield Accepted()
    yield Hang()


def read_request(connection: socket.socket) -> bytes:
    """The next request, head and body.

    Raises:
        ConnectionError: the client has closed the connection.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        data += _receive(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    while len(body) < sum(lengths):
        body += _receive(connection)
    return head + b"\r\n\r\n" + body


def _receive(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("The client has closed the connection.")
    return data


class StubWorker:
    """One slot's worker. Records its calls."""

    def __init__(self, address: str, respond: Respond, tokenize: Tokenize | None = None) -> None:
        self.calls: list[GenerateRequest] = []
        self.num_running = 0
        self.max_running = 0
        self.num_hangups = 0
        self._respond = respond
        self._tokenize = tokenize
        self._changed = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # a test may have closed it
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def wait(self, condition: Callable[[StubWorker], bool], timeout_s: float = 5.0) -> None:
        """Until something about the worker holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout=timeout_s)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:  # a gateway that hangs up breaks a write; that is no error
            head, _, body = read_request(connection).partition(b"\r\n\r\n")
            if head.startswith(b"POST /tokenize "):
                assert self._tokenize is not None
                found = self._tokenize(parse_tokenize_request(body).text)
                connection.sendall(_refused(503, found) if isinstance(found, str) else _response(200, found))
                return
            request = parse_generate_request(body)
            with self._changed:
                self.calls.append(request)
                self.num_running += 1
                self.max_running = max(self.max_running, self.num_running)
                self._changed.notify_all()
            self._send(connection, self._respond(request))

    def _end(self, *, is_hangup: bool = False) -> None:
        with self._changed:
            self.num_running -= 1
            self.num_hangups += is_hangup
            self._changed.notify_all()

    def _send(self, connection: socket.socket, steps: Iterable[Step]) -> None:
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        for step in steps:
            # Before its last bytes: the gateway may send the next call as soon as it has them.
            if isinstance(step, Done | Failed | Together | Raw | Refusal | Break):
                self._end()
            if isinstance(step, Refusal):
                connection.sendall(_refused(step.status, step.code))
                return
            if isinstance(step, Break):
                return
            if isinstance(step, Hang):
                with suppress(OSError):
                    connection.recv(1)
                self._end(is_hangup=True)
                return
            data = step.data if isinstance(step, Raw) else _encode_lines(step)
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(data), data))
            head = b""
        connection.sendall(b"0\r\n\r\n")


def _response(status: int, value: object) -> bytes:
    body = msgspec.json.encode(value)
    return b"HTTP/1.1 %d X\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def _refused(status: int, code: str) -> bytes:
    return _response(status, {"code": code, "detail": f"Refused: {code}."})


def _encode_lines(step: GenerateLine | Together) -> bytes:
    lines = step.lines if isinstance(step, Together) else [step]
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


class StubPool:
    """Stub workers, one per responder, and the gateway's own admission, clients and fan-out in front of them."""

    def __init__(
        self,
        run_path: Path,
        *responders: Respond,
        max_batch: int = 3,
        queue: int = 24,
        n_ctx: int = 1024,
        num_threads: int = 16,
        num_retries: int = 1000,
        tokenize: Tokenize | None = None,
    ) -> None:
        slots = make_slots(["cpu"], [("small", len(responders))], run_path, max_batch)
        self.plan = Plan({}, [Model("small", "", "", n_ctx, 500)], slots)
        self.workers = [
            StubWorker(slot.socket, respond, tokenize) for slot, respond in zip(slots, responders, strict=True)
        ]
        self.admission = Admission(self.plan, "auto", queue)
        for slot in slots:
            self.admission.update(slot.index, State(state="warm", ms_per_token=1.0, protocol=PROTOCOL))
        self.metrics = Metrics(self.admission.states, lambda: self.admission.num_waiting)
        self.clients = [SlotClient(slot, ack_s=10.0) for slot in slots]
        self.fanout = Fanout(
            self.clients, self.admission, self.metrics, num_threads, RetryBudget(min_retries=num_retries)
        )

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for worker in self.workers:
            worker.close()

    def wait_until_idle(self) -> None:
        """Until no branch has room reserved or waits for it."""
        until(lambda: not (any(self.admission.in_flight()) or self.admission.num_waiting), 5, "an idle pool")

    def num_branches(self, slot: int, outcome: str) -> float:
        """The counter of branches with an outcome."""
        return total(self.metrics, "tercet_branches_total", slot=str(slot), outcome=outcome)


MakePool = Callable[..., StubPool]


def make_spec(
    timeout_s: float = 10.0, request_id: str = "r1", owner: str = "", *, is_job: bool = False, **fields: Any
) -> GenerationSpec:
    """Three completions of a short prompt; `fields` replace any of the spec's."""
    defaults: dict[str, Any] = {
        "caller": Caller(request_id, owner, is_job=is_job),
        "model": "small",
        "prompts": ("He saw",),
        "max_prompt_tokens": 100,
        "num_completions": 3,
        "seed": 7,
        "sampling": Sampling(max_new_tokens=20),
        "ranks_first_token": True,
        "heals": True,
        "echoes": False,
        "num_top_logprobs": None,
        "is_streamed": False,
        "deadline": time.monotonic() + timeout_s,
        "session": None,
    }
    return GenerationSpec(**(defaults | fields))
