"""Closed-loop and open-loop HTTP clients of a running gateway, one thread each.

Knows HTTP and the clock. Does not know tensors or who serves. A client is as thin as Python allows (`http.client` on a
persistent connection), and the CPU time of all clients is measured and reported.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from deploy.tuning.load.workload import PromptGenerator, Workload
from workers.checkpoints.resolve import Checkpoint

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 120.0
MAX_OPEN_LOOP_CLIENTS = 128  # threads; requests beyond them are sent late, and their wait counts
DEFAULT_LENGTH = 20  # of `POST /autocomplete`
Body = dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """One request as its client saw it.

    `engine_ms` is queue + prefill + decode of the slowest sentence, as the response reports it; the rest of `wall_ms`
    is spent in the gateway, the sockets and the client.
    """

    status: int
    wall_ms: float
    engine_ms: float = 0.0
    first_text_ms: float = 0.0  # time to the first text delta of a streamed response
    num_tokens: int = 0  # generated, including those trimmed from the end
    cached_tokens: int = 0  # prefix-cache hit; the smallest of any sentence


class LoadResult(msgspec.Struct, frozen=True):
    """What concurrent clients did. `elapsed_s` is from their common start to the last response."""

    replies: list[Reply]
    elapsed_s: float
    client_cpu_s: float  # of all clients


class Clients:
    """Clients of one gateway; created in a process of its own."""

    def __init__(self, host: str, port: int, subject: Checkpoint, workload: Workload, seed: int, **more: Any) -> None:
        """
        Args:
            host, port: the gateway, on the loopback interface.
            subject: the model whose tokenizer counts the prompts' tokens.
            more: fields for every request besides the workload's.
        """
        self._address = host, port
        self._workload = workload
        self._prompts = PromptGenerator(subject, seed)
        self._random = random.Random(seed)
        self._more = more
        self._lock = threading.Lock()

    def send_new(self, num_requests: int) -> list[Reply]:
        """One client: requests with new prompts, one after another."""
        return self.send([self._new_body() for _ in range(num_requests)])

    def send(self, bodies: list[Body]) -> list[Reply]:
        """One client: these requests, one after another."""
        with Connection(*self._address) as connection:
            return [connection.request(body) for body in bodies]

    def send_concurrently(self, num_clients: int, num_requests: int) -> LoadResult:
        """Clients that start together and send `num_requests` requests each."""
        return self._run_clients(
            num_clients, lambda connection, _: (connection.request(self._new_body()) for _ in range(num_requests))
        )

    def send_for(self, num_clients: int, seconds: float, is_streamed: bool = False) -> LoadResult:
        """Clients that start together and send requests for `seconds`; requests in flight then are awaited."""
        more = {"stream": True} if is_streamed else {}

        def send_until_timeout(connection: Connection, start_s: float) -> Iterator[Reply]:
            while time.perf_counter() < start_s + seconds:
                yield connection.request(self._new_body() | more)

        return self._run_clients(num_clients, send_until_timeout)

    def send_at_rate(self, rate_qps: float, seconds: float) -> LoadResult:
        """Open loop: Poisson arrivals at `rate_qps` for `seconds`; requests in flight then are awaited.

        The number of arrivals is fixed to its mean: given their number, the arrivals of a Poisson process are
        independent and uniform. `wall_ms` counts from the planned arrival, so that a request that is sent late, because
        the server holds all clients, has waited (no coordinated omission).
        """
        num_requests = max(1, round(rate_qps * seconds))
        offsets_s = sorted(self._random.uniform(0, seconds) for _ in range(num_requests))
        arrivals = iter([(offset_s, self._new_body()) for offset_s in offsets_s])
        lock = threading.Lock()

        def send_planned(connection: Connection, start_s: float) -> Iterator[Reply]:
            while True:
                with lock:
                    offset_s, body = next(arrivals, (0.0, None))
                if body is None:
                    return
                time.sleep(max(0.0, start_s + offset_s - time.perf_counter()))
                reply = connection.request(body)
                wall_ms = 1e3 * (time.perf_counter() - start_s - offset_s)
                yield msgspec.structs.replace(reply, wall_ms=wall_ms)

        return self._run_clients(min(num_requests, MAX_OPEN_LOOP_CLIENTS), send_planned)

    def _new_body(self) -> Body:
        with self._lock:  # one generator for all threads, so that no two clients draw the same prompt
            context, seed = self._prompts.text(self._workload.num_prompt_tokens), self._prompts.seed()
        return self._workload.body(context, seed, **self._more)

    def _run_clients(self, num_clients: int, send: Callable[[Connection, float], Iterable[Reply]]) -> LoadResult:
        """
        Args:
            send: sends one client's requests; gets its connection and the time of the start (`time.perf_counter`),
                which is the same for all clients, once all are connected.
        """
        replies: list[list[Reply]] = []
        started: list[float] = []
        barrier = threading.Barrier(num_clients, lambda: started.extend((time.perf_counter(), time.process_time())))

        def run_client() -> None:
            with Connection(*self._address) as connection:
                barrier.wait()
                replies.append([*send(connection, started[0])])

        threads = [threading.Thread(target=run_client, daemon=True) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended = time.perf_counter(), time.process_time()
        elapsed_s, cpu_s = (end - start for start, end in zip(started, ended, strict=True))
        return LoadResult([reply for own in replies for reply in own], elapsed_s, cpu_s)


class Exchange(msgspec.Struct, frozen=True):
    """A request and its response, in times of `time.time()`. Status 0: the connection was lost."""

    status: int
    answer: bytes  # the body, or the last event's data if the response was streamed
    started_at: float
    first_text_at: float  # 0 if the response was not streamed
    ended_at: float

    @property
    def ms(self) -> float:
        return 1e3 * (self.ended_at - self.started_at)

    def reply(self, length: int) -> Reply:
        """The figures in a response of `POST /autocomplete` to a request for `length` tokens."""
        if self.status != 200:
            return Reply(self.status, self.ms)
        sentences = json.loads(self.answer)["sentences"]
        return Reply(
            status=self.status,
            wall_ms=self.ms,
            engine_ms=max(found["queue_ms"] + found["prefill_ms"] + found["decode_ms"] for found in sentences),
            first_text_ms=1e3 * (self.first_text_at - self.started_at) if self.first_text_at else 0.0,
            num_tokens=sum(length if found["finish_reason"] == "length" else found["tokens"] for found in sentences),
            cached_tokens=min(found["cached_tokens"] for found in sentences),
        )


class Connection:
    """A persistent connection to the gateway. A request is timed from before its first byte to the response's last."""

    def __init__(self, host: str, port: int) -> None:
        self._http = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

    def __enter__(self) -> Connection:
        self._http.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def request(self, body: Body) -> Reply:
        """Send a request and read its figures. After a lost connection the next request opens another."""
        return self.exchange(body).reply(body.get("length", DEFAULT_LENGTH))

    def exchange(
        self, body: Body, headers: Mapping[str, str] | None = None, *, path: str = "/autocomplete"
    ) -> Exchange:
        """Send a request; the response is not interpreted."""
        data = json.dumps(body).encode()
        first_text_at = 0.0
        started_at = time.time()
        try:
            self._http.request("POST", path, data, {"Content-Type": "application/json", **(headers or {})})
            response = self._http.getresponse()
            if response.headers.get_content_type() == "text/event-stream" and response.readline():  # of the first event
                first_text_at = time.time()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            self._http.close()
            return Exchange(0, b"", started_at, 0.0, time.time())
        ended_at = time.time()
        if first_text_at:  # the last event has the whole answer
            answer = answer.rpartition(b"data: ")[2]
        return Exchange(response.status, answer, started_at, first_text_at, ended_at)
