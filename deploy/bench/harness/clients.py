"""Editors that ask and wait: closed-loop clients of a running gateway, one thread each, in a child process.

Knows HTTP and the clock. Refuses to know tensors and who serves. A client is as thin as Python allows (`http.client`
on a connection that is kept), and what all of them cost the machine is measured and reported.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from deploy.bench.harness.workload import Subject, Workload, Writer
from shared.errors import StartError

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 120.0
DEFAULT_LENGTH = 20  # of `POST /autocomplete`
Body = dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """One request as its client saw it, milliseconds.

    `engine_ms` is queue + prefill + decode of the slowest sentence; the rest of `wall_ms` is the gateway's, the
    socket's and the client's.
    """

    status: int
    wall_ms: float
    engine_ms: float = 0.0
    first_text_ms: float = 0.0  # of a streamed answer
    num_tokens: int = 0  # computed; what is cut off to end at a word counts as well
    cached_tokens: int = 0  # the least of any sentence

    @property
    def overhead_ms(self) -> float:
        return self.wall_ms - self.engine_ms


class Crowd(msgspec.Struct, frozen=True):
    """What some clients did at the same time. `elapsed_s` is from their common start to the last answer."""

    replies: list[Reply]
    elapsed_s: float
    client_cpu_s: float  # all clients together


def check(replies: list[Reply]) -> list[Reply]:
    """The replies, all of them answers.

    Raises:
        StartError: one was not; its time means nothing.
    """
    for reply in replies:
        if reply.status != 200:
            raise StartError(f"The server under test answered a request with status {reply.status} (0: broken off).")
    return replies


class Clients:
    """Made in a child process. Every context is new, unless the caller gives the body."""

    def __init__(self, host: str, port: int, subject: Subject, workload: Workload, seed: int, more: Body) -> None:
        """
        Args:
            host, port: of the gateway, on the loopback.
            subject: whose tokenizer counts the prompt's tokens.
            more: fields for every request besides W's. With `max_tokens` the texts are twice as long as the prompt,
                and the server cuts them: it may then have another tokenizer.
        """
        self._address = host, port
        self._workload = workload
        self._writer = Writer(subject.tokenizer(), seed)
        self._num_tokens = workload.num_prompt_tokens * (2 if "max_tokens" in more else 1)
        self._more = more
        self._lock = threading.Lock()

    def ask(self, num_times: int) -> list[Reply]:
        """One client, `num_times` new prompts."""
        with Connection(*self._address) as connection:
            return [connection.ask(self._new_body()) for _ in range(num_times)]

    def type(self, bodies: list[Body]) -> list[Reply]:
        """One client, these requests one after another."""
        with Connection(*self._address) as connection:
            return [connection.ask(body) for body in bodies]

    def crowd(self, num_clients: int, num_requests: int) -> Crowd:
        """Clients that start together and ask `num_requests` times each."""
        return self._together(num_clients, lambda: (self._new_body() for _ in range(num_requests)))

    def loop(self, num_clients: int, seconds: float, is_streamed: bool = False) -> Crowd:
        """Clients that start together and go on asking for so long; what is under way then is waited for."""
        more = {"stream": True} if is_streamed else {}

        def until_time_is_up() -> Iterator[Body]:
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                yield self._new_body() | more

        return self._together(num_clients, until_time_is_up)

    def _new_body(self) -> Body:
        with self._lock:  # one writer for all threads: no two clients draw alike
            context, seed = self._writer.text(self._num_tokens), self._writer.seed()
        return self._workload.body(context, seed, **self._more)

    def _together(self, num_clients: int, make_bodies: Callable[[], Iterable[Body]]) -> Crowd:
        replies: list[list[Reply]] = [[] for _ in range(num_clients)]
        barrier = threading.Barrier(num_clients + 1)

        def client(own: list[Reply]) -> None:
            with Connection(*self._address) as connection:
                barrier.wait()
                own.extend(connection.ask(body) for body in make_bodies())

        threads = [threading.Thread(target=client, args=(own,)) for own in replies]
        for thread in threads:
            thread.start()
        barrier.wait()
        start, cpu_start = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.join()
        return Crowd(
            [reply for own in replies for reply in own],
            time.perf_counter() - start,
            time.process_time() - cpu_start,
        )


class Exchange(msgspec.Struct, frozen=True):
    """A request and its answer, the last event's data where it was streamed. Times of `time.time()`; status 0: it broke
    off."""

    status: int
    answer: bytes
    started_at: float
    first_text_at: float  # 0 where it was not streamed
    ended_at: float

    @property
    def ms(self) -> float:
        return 1e3 * (self.ended_at - self.started_at)


class Connection:
    """A kept connection to the gateway. A request's time is from before its first byte to after the answer's last."""

    def __init__(self, host: str, port: int) -> None:
        self._http = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

    def __enter__(self) -> Connection:
        self._http.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, body: Body) -> Reply:
        """A request that breaks off counts as one of status 0; the next one has a new connection."""
        done = self.exchange(body)
        first_text_ms = 1e3 * (done.first_text_at - done.started_at) if done.first_text_at else 0.0
        return read_reply(done.status, done.ms, done.answer, body.get("length", DEFAULT_LENGTH), first_text_ms)

    def exchange(self, body: Body, headers: Mapping[str, str] | None = None) -> Exchange:
        """The same as it came."""
        data = json.dumps(body).encode()
        first_text_at = 0.0
        started_at = time.time()
        try:
            self._http.request("POST", "/autocomplete", data, {"Content-Type": "application/json", **(headers or {})})
            response = self._http.getresponse()
            if body.get("stream") and response.readline():  # the first event's name
                first_text_at = time.time()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            self._http.close()
            return Exchange(0, b"", started_at, 0.0, time.time())
        ended_at = time.time()
        if first_text_at:  # the last event is the answer
            answer = answer.rpartition(b"data: ")[2]
        return Exchange(response.status, answer, started_at, first_text_at, ended_at)


def read_reply(status: int, wall_ms: float, answer: bytes, length: int, first_text_ms: float = 0.0) -> Reply:
    """The figures in an answer of `POST /autocomplete` to a request for so many tokens."""
    if status != 200:
        return Reply(status, wall_ms)
    sentences = json.loads(answer)["sentences"]
    return Reply(
        status=status,
        wall_ms=wall_ms,
        engine_ms=max(one["queue_ms"] + one["prefill_ms"] + one["decode_ms"] for one in sentences),
        first_text_ms=first_text_ms,
        num_tokens=sum(length if one["finish_reason"] == "length" else one["tokens"] for one in sentences),
        cached_tokens=min(one["cached_tokens"] for one in sentences),
    )
