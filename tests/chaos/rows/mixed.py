"""R33: requests of all kinds, clients that hang up, reloads and killed workers, for long."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import partial
from typing import Any

from tests.chaos.http_client import LOOPBACK, Answer, Connection, completion_request, exchange, request_bytes
from tests.chaos.measure import Context, Findings
from tests.chaos.rows.soak import CACHE_MB, MAX_BATCH, models
from tests.chaos.rows.workers import pids, wait_until_replaced
from tests.e2e.harness import Tercet, Usage, running, until, usages

NUM_CLIENTS = 6
NUM_CYCLES = 5
HANG_UP_PAUSE_S = 0.05
SETTLE_S = 2.0  # jobs end, and what clients that hung up had asked for
MAX_GROWTH_MB = 5.0
REPLACE_S, JOBS_S = 120.0, 300.0
# Shares of requests, of 1,000.
KINDS = {
    "autocomplete": 500,
    "autocomplete stream": 100,
    "completions": 100,
    "completions stream": 50,
    "generate": 80,
    "generate stream": 50,
    "tokenize": 60,
    "models": 30,
    "ready": 25,
    "job": 5,
}
# What the last event of a complete stream has.
ENDS = {
    "autocomplete stream": b"event: done",
    "completions stream": b"[DONE]",
    "generate stream": b'"generated_text":"',
}


def make_request(kind: str, rng: random.Random) -> bytes:
    """A short one, so that the machine serves many."""
    number = rng.randrange(10**6)
    text = f"Door {number} opened, and" * (40 if number % 20 == 0 else 1)
    length = 1 + number % 3
    match kind:
        case "autocomplete" | "autocomplete stream":
            fields: dict[str, Any] = {"length": length, "n_samples": 3 if number % 4 == 0 else 1}
            if number % 10 == 0:
                fields["session"] = f"s{number}"
            if kind.endswith("stream"):
                fields["stream"] = True
            return completion_request(text, **fields)
        case "completions" | "completions stream":
            return _post("/v1/completions", prompt=text, max_tokens=length, stream=kind.endswith("stream"))
        case "generate":
            return _post("/generate", inputs=text, parameters={"max_new_tokens": length})
        case "generate stream":
            return _post("/generate_stream", inputs=text, parameters={"max_new_tokens": length})
        case "tokenize":
            return _post("/tokenize", inputs=text)
        case "job":
            return _post("/jobs", prompt=text, length=length)
        case "models":
            return request_bytes("GET", "/v1/models")
        case _:
            return request_bytes("GET", "/health/ready")


def _post(path: str, **fields: Any) -> bytes:
    return request_bytes("POST", path, json.dumps(fields).encode())


def fault_of(kind: str, answer: Answer) -> str:
    """Why an answer is none, or not whole; "" if it is. A text in a worker that is killed is sent to no other."""
    if kind == "tokenize" and answer.status == 503 and b"while it tokenized" in answer.body:
        return ""
    if answer.status != (202 if kind == "job" else 200):
        return f"{kind}: {answer.status} {answer.body[:120].decode(errors='replace')}"
    if (end := ENDS.get(kind)) is not None:
        return "" if end in answer.body else f"{kind}: it has no end"
    document = answer.document()
    return f"{kind}: partial" if isinstance(document, dict) and document.get("partial") else ""


class _Clients:
    """Clients that send one request after another, until they are stopped; they keep counts, and the ids of jobs."""

    def __init__(self, port: int, seed: int) -> None:
        self.num_answers = 0
        self.faults: Counter[str] = Counter()
        self.jobs: list[str] = []
        self.num_hang_ups = 0
        self._port = port
        self._lock = threading.Lock()
        self._num_busy = 0
        self._may_ask = threading.Event()
        self._may_ask.set()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(random.Random(f"{seed}/{index}"),)) for index in range(NUM_CLIENTS)
        ]
        self._threads.append(threading.Thread(target=self._hang_up, args=(random.Random(seed),)))

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the block runs, no request is in progress; connections stay open."""
        self._may_ask.clear()
        until(lambda: not self._num_busy, 60, "the requests in progress have ended")
        yield
        self._may_ask.set()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._lock:
            self._num_busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_busy -= 1

    def wait_for(self, more: int) -> None:
        wanted = self.num_answers + more
        while self.num_answers < wanted:
            time.sleep(0.01)

    def _ask(self, rng: random.Random) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        with Connection(self._port) as connection:
            while not self._stop.is_set():
                if not self._may_ask.wait(0.1):
                    continue
                [kind] = rng.choices(kinds, weights)
                with self._asking():
                    answer = connection.exchange(make_request(kind, rng))
                fault = fault_of(kind, answer)
                with self._lock:
                    self.num_answers += 1
                    if fault:
                        self.faults[fault] += 1
                    elif kind == "job":
                        self.jobs.append(str(answer.document()["id"]))

    def _hang_up(self, rng: random.Random) -> None:
        """At once, or after the first bytes of a long stream."""
        while not self._stop.wait(HANG_UP_PAUSE_S):
            if not self._may_ask.is_set():
                continue
            request = completion_request(f"Gate {rng.random()} was", length=100, n_samples=3, stream=True)
            address = LOOPBACK, self._port
            with self._asking(), suppress(OSError), socket.create_connection(address, timeout=10) as client:
                client.sendall(request)
                if rng.random() < 0.5:
                    client.recv(512)
            self.num_hang_ups += 1


def flat_usage_over_cycles(context: Context, findings: Findings) -> None:
    """R33. A cycle reloads, then kills a worker, and compares each process with that of the first cycle at the same
    number of requests since its start."""
    num_requests = context.amount(2000, 20_000)
    num_each = num_requests // (2 * NUM_CYCLES)
    limits = {"cache_mb": str(CACHE_MB), "max_batch": str(MAX_BATCH), "dtype": "int8"}  # int8 serves more in the time
    with running(context.directory(), models=models(context), **limits) as tercet:
        clients = _Clients(tercet.port, context.seed)
        measured: list[dict[str, Usage]] = []
        with clients.running():
            for _ in range(NUM_CYCLES):
                before = pids(tercet)
                tercet.process.send_signal(signal.SIGHUP)
                wait_until_replaced(tercet, before, REPLACE_S)
                clients.wait_for(num_each)
                [_, victim] = pids(tercet)
                os.kill(victim, signal.SIGKILL)
                wait_until_replaced(tercet, [victim], REPLACE_S)
                clients.wait_for(num_each)
                with clients.paused():
                    _fill_slots(tercet.port)
                    time.sleep(SETTLE_S)
                    measured.append(_all_usages(tercet))
        lost = _lost_jobs(tercet, clients.jobs)
    findings.figures |= {
        "answers": clients.num_answers,
        "hang-ups": clients.num_hang_ups,
        "jobs": len(clients.jobs),
        "reloads, and kills": NUM_CYCLES,
    }
    findings.none_of("failed requests", dict(clients.faults))
    findings.none_of("lost jobs", lost)
    # Threads are made when they are needed first, so an age has no exact number of them: a leak is what the least of
    # the last cycles has more than the most of the first. Which slot has the gateway's connections is chance, too, so
    # the slots are compared together.
    first, last = measured[: NUM_CYCLES // 2], measured[-(NUM_CYCLES // 2) :]
    for name in [name for name in measured[0] if name != "slots"]:
        most, least = _extreme(max, first, name), _extreme(min, last, name)
        findings.at_most(f"{name}: memory growth MB", (least.rss_bytes - most.rss_bytes) / 1e6, MAX_GROWTH_MB)
    for name in [name for name in measured[0] if not name.startswith("slot ")]:
        most, least = _extreme(max, first, name), _extreme(min, last, name)
        findings.at_most(f"{name}: descriptors grown", least.num_descriptors - most.num_descriptors, 0)
        findings.at_most(f"{name}: threads grown", least.num_threads - most.num_threads, 0)


def _fill_slots(port: int) -> None:
    """Send what fills both slots at once: each cycle's gateway then has as many connections to them as it may have,
    where clients alone leave their number to chance."""
    with ThreadPoolExecutor(MAX_BATCH) as pool:
        requests = [completion_request(f"Wall {number}", length=30, n_samples=3) for number in range(MAX_BATCH)]
        statuses = Counter(answer.status for answer in pool.map(partial(exchange, port), requests))
    assert statuses == {200: MAX_BATCH}, statuses


def _extreme(choose: Callable[[Iterable[int]], int], cycles: list[dict[str, Usage]], name: str) -> Usage:
    usages = [cycle[name] for cycle in cycles]
    return Usage(*(choose(column) for column in zip(*map(astuple, usages), strict=True)))


def _all_usages(tercet: Tercet) -> dict[str, Usage]:
    """Those of the workers of both pools, the masters and the supervisor."""
    masters = {
        f"{role}'s master" if role != "serve" else role: Usage.of(processes[0])
        for role, processes in tercet.processes().items()
    }
    slots = usages(tercet)
    together = zip(*(astuple(usage) for name, usage in slots.items() if name.startswith("slot ")), strict=True)
    return slots | masters | {"slots": Usage(*map(sum, together))}


def _lost_jobs(tercet: Tercet, jobs: list[str]) -> dict[str, int]:
    """The jobs that do not succeed, by their state in the end."""

    def unsettled() -> list[str]:
        return [job for job in jobs if _state(tercet, job) in {"queued", "running"}]

    with suppress(AssertionError):
        until(lambda: not unsettled(), JOBS_S, "all jobs have ended")
    return dict(Counter(state for job in jobs if (state := _state(tercet, job)) != "succeeded"))


def _state(tercet: Tercet, job: str) -> str:
    answer = exchange(tercet.port, request_bytes("GET", f"/jobs/{job}"))
    return str(answer.document()["state"]) if answer.status == 200 else f"answered with {answer.status}"
