"""Load on a gateway: clients that wait for their answers, and requests that arrive at a rate whatever the server does.

It knows when requests are sent; what they are and what their answers must be is its caller's.
"""

from __future__ import annotations

import os
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.bench.rounds import percentile
from tests.chaos.http_client import RETRYABLE, Answer, Connection, completion_request, find_fault

MakeRequest = Callable[[random.Random], bytes]
# Of an open-loop generator; a server that holds as many requests at once has no bound on its queue.
MAX_CLIENTS = 200
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


def short_completion(rng: random.Random, headers: dict[str, str] | None = None, length: int = 12) -> bytes:
    """A request like an editor's, with a prompt of its own."""
    return completion_request(f"She opened door {rng.randrange(10**6)}, and", headers=headers, length=length)


def run_threads(number: int, target: Callable[[int], object]) -> None:
    """Call `target` with each number in a thread of its own, until all have returned."""
    threads = [threading.Thread(target=target, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Load:
    """Clients on persistent connections, a thread each, that send one request after another until stopped.

    A client that is refused waits as long as `Retry-After` says.
    """

    def __init__(
        self,
        port: int,
        num_clients: int,
        *,
        seed: int = 0,
        make_request: MakeRequest = short_completion,
        pause_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """
        Args:
            pause_s: longest pause of a client between an answer and its next request; the pauses are random.
        """
        self.answers: list[Answer] = []
        self._stop = threading.Event()
        self._port, self._tls = port, tls
        self._make_request = make_request
        self._pause_s = pause_s
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{index}"),)) for index in range(num_clients)
        ]

    def _run(self, rng: random.Random) -> None:
        with Connection(self._port, self._tls) as connection:
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

    def wait_for(self, more: int, timeout_s: float = 180.0) -> None:
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


def offer(port: int, rate: float, seconds: float, *, seed: int = 0) -> OfferedLoad:
    """Send requests at `rate` per second for `seconds`, whatever the server does, and await those in flight.

    Arrivals are random: given their number, those of a Poisson process are independent and uniform. Each is sent by
    the first client that is free, of `MAX_CLIENTS`, each on its connection.
    """
    rng = random.Random(seed)
    offsets_s = sorted(rng.uniform(0, seconds) for _ in range(round(rate * seconds)))
    arrivals = iter([(offset_s, short_completion(rng)) for offset_s in offsets_s])
    offered = OfferedLoad()
    lock = threading.Lock()
    began_at = time.monotonic()

    def run_client(_number: int) -> None:
        with prioritized(), Connection(port) as connection:
            while True:
                with lock:
                    offset_s, request = next(arrivals, (0.0, b""))
                if not request:
                    return
                time.sleep(max(0.0, began_at + offset_s - time.monotonic()))
                offered.lag_s.append(time.monotonic() - began_at - offset_s)
                offered.answers.append(connection.exchange(request))

    run_threads(MAX_CLIENTS, run_client)
    return offered


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
