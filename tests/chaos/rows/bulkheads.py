"""R28: bulkheads. One key bursts at a route, or a store hangs; another key's requests are answered."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from shared.api_keys import new_key
from tests.chaos.http_client import Answer, exchange, request_bytes, request_head
from tests.chaos.load import Load, count_failures, milliseconds, short_completion
from tests.chaos.measure import Context, Findings
from tests.chaos.rows.workers import pids
from tests.e2e.harness import Tercet, metric, until

NUM_OTHERS = 2  # clients of the other key
MIB_TEXT = "The old man looked at the sea, and said nothing. " * 21_000
JOB = {"context": "The old man looked at the sea and", "length": 4, "n": 1}
LATE = re.compile(rb"deadline|No completion was ready in time")
# The other key's answers in each calm, and beside each burst and pair. What is calm changes from minute to minute, so a
# calm precedes each, once the jobs of earlier bursts have ended; the p99 beside a burst is compared with that of all
# answers in a calm.
NUM_CALM, NUM_COMPARED = 20, 400
# How long the jobs of a burst may take.
JOBS_END_S = 120
# A burst is sent until there are as many answers, at most once in this time. Without a pause it would be a flood, of
# more requests than the machine can refuse.
PERIOD_S = 1.0
THREADS = ThreadPoolExecutor(150)  # in a process that sends bursts; to start them takes as long as to refuse


@dataclass(frozen=True)
class Burst:
    """What one key sends: requests at once; and what the other key sends at the same route."""

    method: str
    path: str
    body: bytes
    num_requests: int
    other: tuple[str, str, bytes] | None = None


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


TOKENIZE = ("POST", "/tokenize", _json({"prompt": "The old man"}))
MAX_LENGTH = {"inputs": MIB_TEXT, "parameters": {"max_length": 20, "truncate": 8}}
BURSTS = {
    "/tokenize, 1 MB": Burst("POST", "/tokenize", _json({"inputs": MIB_TEXT}), 60, TOKENIZE),
    "/tokenize, 18 kB": Burst("POST", "/tokenize", _json({"prompt": MIB_TEXT[:18_000]}), 150, TOKENIZE),
    "max_length, 1 MB": Burst("POST", "/generate", _json(MAX_LENGTH), 60, TOKENIZE),
    "POST /jobs": Burst("POST", "/jobs", _json(JOB), 150, ("POST", "/jobs", _json(JOB))),
    "GET /jobs/unknown": Burst("GET", "/jobs/{}", b"", 150, ("POST", "/jobs", _json(JOB))),
    "/feedback, 1 MB": Burst(
        "POST",
        "/feedback",
        _json({"id": "x" * 1_000_000, "index": 0, "action": "accepted"}),
        60,
        ("POST", "/feedback", _json({"id": "x", "index": 0, "action": "accepted"})),
    ),
    "reads": Burst("GET", "/metrics", b"", 150, ("GET", "/docs", b"")),
    "unknown paths, 1 MB": Burst("POST", "/nothing/{}", MIB_TEXT.encode()[: 1 << 20], 60, ("GET", "/docs", b"")),
    "/autocomplete, 1 MB": Burst("POST", "/autocomplete", _json({"context": MIB_TEXT, "length": 1}), 60),
}


def send_burst(port: int, name: str, headers: dict[str, str], amount: int) -> list[Answer]:
    """All requests of a burst at once, each on a connection of its own; of their answers, which may have 17 MB, the
    beginning. Runs in a process of its own."""
    burst = BURSTS[name]
    paths = [burst.path.replace("{}", f"{number:024}") for number in range(amount)]  # as long as a job's id
    heads = [request_head(burst.method, path, burst.body, headers) for path in paths]
    answers = list(THREADS.map(lambda head: exchange(port, head, burst.body), heads))
    return [answer._replace(body=answer.body[:500]) for answer in answers]


@contextmanager
def job_store_locked(tercet: Tercet) -> Iterator[None]:
    """Another process holds the write lock of the job file."""
    path = tercet.environ["TERCET_JOBS"].removeprefix("sqlite:")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")


def keep_others_served(context: Context, findings: Findings, dtype: str = "fp32") -> None:
    """R28. Every burst, and every burst while the job store is locked; in the full form, all pairs of bursts."""
    path = context.directory() / "keys"
    keys = {name: {"x-api-key": new_key(path, name, rate=0)[0]} for name in ("bursting", "other")}
    # The burst takes cores from the workers, too: a second for their acknowledgement. And from its clients, which read
    # answers of 17 MB: a minute in which they may read nothing.
    settings = {"key_concurrency": "0", "ack_ms": "1000", "client_timeout_s": "60"}
    settings |= {"keys": str(path), "api_key": keys["other"]["x-api-key"], "dtype": dtype}
    tercet = context.shared(**settings)
    num_calm, num_compared = (4, 10) if context.size == "short" else (NUM_CALM, NUM_COMPARED)
    with closing(_Row(tercet, keys, num_calm, num_compared, findings)) as row:
        for name in BURSTS:
            row.measure(name, [name], share=1 / 3 if context.size == "short" else 1.0)
        row.measure("job store locked", ["POST /jobs"], job_store_locked(tercet))
        if context.size != "short":
            for pair in itertools.combinations(BURSTS, 2):
                row.measure(" + ".join(pair), [*pair], share=1 / 3)
        row.report()


class _Row:
    """The other key's answers while one key bursts."""

    def __init__(
        self, tercet: Tercet, keys: dict[str, dict[str, str]], num_calm: int, num_compared: int, findings: Findings
    ) -> None:
        self._tercet, self._keys, self._findings = tercet, keys, findings
        self._num_calm, self._num_compared = num_calm, num_compared
        self._pids = pids(tercet)
        self._calm: list[Answer] = []
        self._p99_ms: dict[str, float] = {}  # beside each burst and pair
        self._failed: Counter[str] = Counter()
        self._num_answers = self._num_burst = 0
        self._same_route_s: list[float] = []
        # Bursts are sent by other processes: megabytes in this one would delay what it measures.
        self._processes = ProcessPoolExecutor(2, get_context("spawn"))
        for warm_up in [self._processes.submit(str) for _ in range(2)]:
            warm_up.result()

    def close(self) -> None:
        self._processes.shutdown()

    def _load(self) -> Load:
        return Load(self._tercet.port, NUM_OTHERS, make_request=partial(short_completion, headers=self._keys["other"]))

    def measure(
        self,
        name: str,
        bursts: list[str],
        fault: AbstractContextManager[None] | None = None,
        *,
        share: float = 1.0,
    ) -> None:
        """
        Args:
            fault: makes the store of the jobs hang.
            share: of each burst's requests.
        """
        until(self._has_no_jobs, JOBS_END_S, "the jobs of the last burst have ended")
        calm = self._load()
        with calm.running():
            calm.wait_for(self._num_calm)
        self._calm += calm.answers
        self._failed.update({f"before {name}: {what}": n for what, n in count_failures(calm.answers).items()})
        with ExitStack() as stack:
            if fault is not None:
                stack.enter_context(fault)
            load = stack.enter_context(self._load().running())
            over = threading.Event()
            pool = stack.enter_context(ThreadPoolExecutor(2))
            others = [] if fault else [pool.submit(self._others, BURSTS[burst], over) for burst in bursts]
            answers: list[Answer] = []
            while len(load.answers) < self._num_compared:
                next_at = time.monotonic() + PERIOD_S
                sending = [self._send(burst, share) for burst in bursts]
                answers += [answer for future in sending for answer in future.result()]
                time.sleep(max(0.0, next_at - time.monotonic()))
            over.set()
            load.wait_for(2 * NUM_OTHERS)
            for answer in [answer for future in others for answer in future.result()]:
                self._same_route_s.append(answer.seconds)
                if answer.status in {503, 504, 0}:
                    self._failed[f"{name}: same route {answer.status} {answer.body[:300]!r}"] += 1
        self._num_burst += len(answers)
        self._failed.update({f"{name}: {what}": n for what, n in count_failures(load.answers).items()})
        # Its own requests may be refused, or be late, which Text Generation Inference's dialect answers with a 500.
        broken = (a for a in answers if a.status == 0 or (a.status == 500 and not LATE.search(a.body)))
        self._failed.update(f"{name}: burst {answer.status} {answer.body[:80]!r}" for answer in broken)
        if fault is not None:
            statuses = {answer.status for answer in answers}  # beyond its bytes 429, else for the store 503
            self._findings.require(statuses == {429, 503}, f"{name}: answered with {statuses}")
            self._findings.require(all("retry-after" in a.headers for a in answers), f"{name}: no Retry-After")
        self._p99_ms[name] = milliseconds(load.answers, 0.99)
        self._num_answers += len(load.answers)
        before, self._pids = self._pids, pids(self._tercet)
        self._findings.require(before == self._pids, f"{name}: a worker was replaced")

    def _has_no_jobs(self) -> bool:
        time.sleep(0.2)
        return not metric(self._tercet, "tercet_open_jobs ")

    def _send(self, burst: str, share: float) -> Future[list[Answer]]:
        amount = int(share * BURSTS[burst].num_requests)
        return self._processes.submit(send_burst, self._tercet.port, burst, self._keys["bursting"], amount)

    def _others(self, burst: Burst, over: threading.Event) -> list[Answer]:
        """The other key's requests at the route of the burst, one after another."""
        if burst.other is None:
            return []
        request = request_bytes(*burst.other, self._keys["other"])
        answers: list[Answer] = []
        while not over.is_set() or not answers:
            answers.append(exchange(self._tercet.port, request))
            over.wait(0.2)
        return answers

    def report(self) -> None:
        calm_ms = milliseconds(self._calm, 0.99)
        worst = max(self._p99_ms, key=lambda name: self._p99_ms[name])
        self._findings.figures |= {
            "bursts and pairs": len(self._p99_ms),
            "requests in bursts": self._num_burst,
            "answers to the other key": self._num_answers + len(self._same_route_s),
            "calm answers": len(self._calm),
            "calm p99 ms": calm_ms,
            "the same route's slowest answer s": max(self._same_route_s),
        }
        self._findings.none_of("failed", dict(self._failed))
        self._findings.at_most(f"p99 / calm ({worst})", self._p99_ms[worst] / calm_ms, 2.0, is_speed=True)
