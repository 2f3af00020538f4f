"""Load on a gateway: clients that wait for their answers, and requests that arrive at a rate whatever the server does.

It knows when requests are sent; what they are and what their answers must be is its caller's.
"""

from __future__ import annotations

import os
import random
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httptools

from deploy.load.rounds import percentile
from tests.chaos.http_client import (
    RETRYABLE,
    Answer,
    Connection,
    Endpoint,
    ResponseReader,
    completion_request,
    find_fault,
)

MakeRequest = Callable[[random.Random], bytes]
# Limit of an open-loop generator; a server that holds more requests than this at once has no bound on its queue.
MAX_OPEN_CONNECTIONS = 900
CLIENT_PRIORITY = -15


@contextmanager
def prioritized() -> Iterator[None]:
    """The calling thread runs before others, where this process may ask for that (root).

    For clients that time answers: on the machine of the server, a client that waits for a core adds that wait.
    """
    was = os.getpriority(os.PRIO_PROCESS, 0)  # of the thread, on Linux
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, CLIENT_PRIORITY)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, was)


def short_completion(rng: random.Random) -> bytes:
    """A request like an editor's, with a prompt of its own."""
    return completion_request(f"She opened door {rng.randrange(10**6)}, and", length=12)


class Load:
    """Clients on persistent connections, a thread each, that send one request after another until stopped.

    A client that is refused waits as long as `Retry-After` says.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        num_clients: int,
        *,
        seed: int = 0,
        make_request: MakeRequest = short_completion,
        pause_s: float = 0.0,
    ) -> None:
        """
        Args:
            pause_s: longest pause of a client between an answer and its next request; the pauses are random.
        """
        self.answers: list[Answer] = []
        self._stop = threading.Event()
        self._endpoint = endpoint
        self._make_request = make_request
        self._pause_s = pause_s
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{index}"),)) for index in range(num_clients)
        ]

    def _run(self, rng: random.Random) -> None:
        with Connection(self._endpoint) as connection:
            while not self._stop.is_set():
                answer = connection.exchange(self._make_request(rng))
                self.answers.append(answer)
                if answer.status == 0:
                    self._stop.wait(0.05)  # no busy loop while the server refuses connections
                elif answer.status in RETRYABLE:
                    self._stop.wait(float(answer.headers.get("retry-after", 0)))
                elif self._pause_s:
                    self._stop.wait(rng.uniform(0, self._pause_s))

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    def run_for(self, seconds: float) -> list[Answer]:
        """The answers of `seconds` under this load."""
        with self.running():
            time.sleep(seconds)
        return self.answers

    def wait_for(self, more: int, timeout_s: float = 60.0) -> None:
        """Wait for `more` further answers.

        Raises:
            TimeoutError: they did not come.
        """
        wanted, deadline = len(self.answers) + more, time.monotonic() + timeout_s
        while len(self.answers) < wanted:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{more} more answers did not come within {timeout_s:g} s")
            time.sleep(0.005)


@dataclass
class OfferedLoad:
    """What came of requests that were sent at a rate. `lag_s`: how late the generator itself sent each of them."""

    answers: list[Answer] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    num_connections: int = 0
    num_unsent: int = 0  # for want of a connection: the server held `MAX_OPEN_CONNECTIONS` requests


@dataclass(slots=True, eq=False)
class _Exchange:
    """A connection of the open loop and the request on it; `reader` is None while it is idle."""

    socket: socket.socket
    started_at: float = 0.0
    reader: ResponseReader | None = None


def offer(
    endpoint: Endpoint, rate: float, seconds: float, *, seed: int = 0, make_request: MakeRequest = short_completion
) -> OfferedLoad:
    """Send requests at `rate` per second, in one thread, each on an idle connection or a new connection.

    Requests arrive at random (Poisson). After `seconds` no more are sent, and those in flight are awaited.
    """
    rng = random.Random(seed)
    offered = OfferedLoad()
    idle: list[_Exchange] = []
    busy: set[_Exchange] = set()
    with prioritized(), selectors.DefaultSelector() as selector:
        due_at = time.monotonic()
        end = due_at + seconds
        give_up_at = end + 40.0
        while (now := time.monotonic()) < end or busy:
            if now > give_up_at:
                offered.answers += [Answer(0, {}, b"no answer", item.started_at, now) for item in busy]
                break
            while due_at <= now and due_at < end:
                _send(endpoint, make_request(rng), due_at, idle, busy, selector, offered)
                due_at += rng.expovariate(rate)
            timeout_s = max(0.0, min(due_at, end) - time.monotonic()) if now < end else 0.1
            for key, _ in selector.select(timeout_s):
                _receive(key.data, idle, busy, selector, offered)
        for item in {*idle, *busy}:
            item.socket.close()
    return offered


def _send(
    endpoint: Endpoint,
    request: bytes,
    due_at: float,
    idle: list[_Exchange],
    busy: set[_Exchange],
    selector: selectors.BaseSelector,
    offered: OfferedLoad,
) -> None:
    if len(busy) >= MAX_OPEN_CONNECTIONS:
        offered.num_unsent += 1
        return
    started_at = time.monotonic()
    try:
        if idle:
            item = idle.pop()
        else:
            item = _Exchange(endpoint.connect(5.0))
            selector.register(item.socket, selectors.EVENT_READ, item)
            offered.num_connections += 1
        item.started_at, item.reader = started_at, ResponseReader()
        busy.add(item)
        item.socket.send(request)  # smaller than a socket's buffer
    except OSError as error:
        offered.answers.append(Answer(0, {}, str(error).encode(), started_at, time.monotonic()))
        return
    offered.lag_s.append(started_at - due_at)


def _receive(
    item: _Exchange, idle: list[_Exchange], busy: set[_Exchange], selector: selectors.BaseSelector, offered: OfferedLoad
) -> None:
    reader, lost = item.reader, ""
    try:
        data = item.socket.recv(65536)
        if not data:
            lost = "closed before the end of the response"
        elif reader is not None:
            reader.feed(data)
    except (OSError, httptools.HttpParserError) as error:
        lost = str(error) or type(error).__name__
    if reader is not None and (lost or reader.is_complete):
        busy.discard(item)
        answer = (
            Answer(0, {}, lost.encode(), item.started_at, time.monotonic())
            if lost
            else Answer(reader.status, reader.headers, reader.body, item.started_at, time.monotonic())
        )
        offered.answers.append(answer)
        item.reader = None
        if not lost and reader.headers.get("connection", "").lower() != "close":
            idle.append(item)
            return
    elif not lost:
        return
    selector.unregister(item.socket)
    item.socket.close()
    if item in idle:
        idle.remove(item)


def milliseconds(answers: Sequence[Answer], share: float) -> float:
    """A percentile (0 to 1) of the answers' times, in milliseconds; NaN without answers."""
    return 1e3 * percentile([answer.seconds for answer in answers], share) if answers else float("nan")


def count_failures(answers: Sequence[Answer]) -> Counter[str]:
    """The answers that are not a whole answer: other statuses than 200, and partial answers with their errors."""
    return Counter(
        _errors(answer) if answer.status == 200 else f"{answer.status} {answer.body.decode(errors='replace')[:200]}"
        for answer in answers
        if answer.status != 200 or find_fault(answer) or answer.document()["partial"]
    )


def _errors(answer: Answer) -> str:
    return f"partial {answer.document().get('errors')}"[:200] if not find_fault(answer) else "faulty"
