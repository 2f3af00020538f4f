"""R19, S10: jobs through kills of the gateway, and jobs of another key."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from scipy.stats import mannwhitneyu

from gateway.jobs.queue import LEASE_S
from tests.chaos.http_client import Answer, Connection, Endpoint, request_bytes
from tests.chaos.instance import endpoint_of, serving
from tests.chaos.measure import Context, Findings
from tests.chaos.rows.keys import SIGNIFICANCE, keyed_instance
from tests.e2e.harness import Tercet, metric, until
from tests.gateway.jobs.servers import AWS_ENVIRON, dynamodb_server, find_redis, redis_server

# Jobs that are queued or running at a kill.
NUM_WAITING = 16
# Jobs that end between two kills, so that no job is the victim of every kill.
MIN_PROGRESS = 16
FINAL = {"succeeded", "failed", "cancelled"}


def job_request(number: int, *, key: str = "", length: int = 120) -> bytes:
    """A job that runs for some tens of milliseconds."""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    body = {"prompt": f"The {number} ships", "num_samples": 1, "length": length, "seed": number}
    return request_bytes("POST", "/jobs", json.dumps(body).encode(), headers)


def keep_jobs_through_kills(context: Context, findings: Findings) -> None:
    """R19. The gateway's worker is killed while it computes jobs. Short: the embedded store; else all three."""
    for store in ("sqlite",) if context.size == "short" else ("sqlite", "redis", "dynamodb"):
        if store == "redis" and find_redis() is None:
            findings.require(False, "redis: redis-server is not installed")
            continue
        with _instance(context, store) as (tercet, endpoint):
            _measure_kills(context, findings, store, tercet, endpoint)


@contextmanager
def _instance(context: Context, store: str) -> Iterator[tuple[Tercet, Endpoint]]:
    if store == "sqlite":
        yield context.shared()
        return
    with ExitStack() as stack:
        if store == "redis":
            url = stack.enter_context(redis_server(context.directory())).url
        else:
            stack.callback(os.environ.update, dict(os.environ))
            os.environ.update(AWS_ENVIRON)
            url = f"dynamodb://jobs?region=eu-central-1&endpoint={stack.enter_context(dynamodb_server())}"
        tercet = stack.enter_context(serving(context.directory(), None, models="embedded*2", jobs=url))
        yield tercet, endpoint_of(tercet)


class _Jobs:
    """The jobs that were submitted: those not known to be final, and the final ones as they were first read."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.num_submitted = 0
        self.num_running = 0
        self.open: list[str] = []
        self.final: dict[str, dict[str, Any]] = {}

    def submit(self, until_open: int) -> None:
        """Submit jobs until this many are not final."""
        self.read()
        for _ in range(until_open - len(self.open)):
            answer = self.connection.exchange(job_request(self.num_submitted))
            if answer.status == 202:
                self.num_submitted += 1
                self.open.append(answer.document()["id"])

    def read(self) -> None:
        self.num_running = 0
        for job_id in list(self.open):
            job = _job(self.connection, job_id)
            self.num_running += job["state"] == "running"
            if job["state"] in FINAL:
                self.open.remove(job_id)
                self.final[job_id] = job

    def have_progressed(self, min_final: int) -> bool:
        """Whether at least `min_final` jobs are final, and another runs. Submits more where there are too few."""
        self.submit(NUM_WAITING)
        return len(self.final) >= min_final and self.num_running > 0

    def have_ended(self) -> bool:
        self.read()
        return not self.open


def _measure_kills(context: Context, findings: Findings, store: str, tercet: Tercet, endpoint: Endpoint) -> None:
    rng = random.Random(context.seed)
    num_kills = context.amount(2, 20)
    num_running = 0
    with Connection(endpoint) as connection:
        jobs = _Jobs(connection)
        for _ in range(num_kills):
            until(partial(jobs.have_progressed, len(jobs.final) + MIN_PROGRESS), 60, f"{store}: jobs end, others run")
            num_running += jobs.num_running
            time.sleep(rng.uniform(0, 0.1))
            [_, worker, *_] = tercet.processes()["gateway"]
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(10)
            until(lambda: _serves(connection), 30, "the gateway's replacement serves")
        killed_at = time.monotonic()
        until(jobs.have_ended, 60 + LEASE_S, f"{store}: every job is final")
        ended_after_s = time.monotonic() - killed_at
        _reload(jobs, tercet)
        again = {job_id: _job(connection, job_id) for job_id in jobs.final}
    states = Counter(job["state"] for job in jobs.final.values())
    findings.figures |= {
        f"{store}: kills": num_kills,
        f"{store}: jobs": jobs.num_submitted,
        f"{store}: running at a kill": num_running,
        f"{store}: all final after the last kill, s": ended_after_s,
    }
    findings.none_of(f"{store}: jobs without a result", {s: n for s, n in states.items() if s != "succeeded"})
    findings.at_most(f"{store}: jobs lost", jobs.num_submitted - len(jobs.final), 0)
    findings.require(again == jobs.final, f"{store}: a final job has changed")
    findings.require(
        all(len(job["result"]["sentences"]) == 1 for job in jobs.final.values() if job["state"] == "succeeded"),
        f"{store}: a result is not the answer",
    )
    ends = Counter(event["job"] for event in tercet.events("job_finished"))
    findings.none_of(f"{store}: jobs that ended twice", {job: n for job, n in ends.items() if n > 1})
    findings.require(num_running > 0, f"{store}: no job ran at a kill")
    returned = [event for event in tercet.events("job_put_back") if event["code"] == "shutting_down"]
    findings.figures[f"{store}: jobs returned at a reload"] = len(returned)
    counted = metric(tercet, 'tercet_jobs_total{event="succeeded"}')
    findings.at_least(f"{store}: successes counted since the reload", counted, 1)
    until(lambda: metric(tercet, "tercet_open_jobs") == 0, 10, f"{store}: the metric of open jobs is 0")


def _reload(jobs: _Jobs, tercet: Tercet) -> None:
    """SIGHUP of the gateway while it computes jobs: the old process returns them, the new process computes them."""
    until(partial(jobs.have_progressed, len(jobs.final)), 30, "a job runs")
    [master, worker, *_] = tercet.processes()["gateway"]
    master.send_signal(signal.SIGHUP)
    worker.wait(60)
    jobs.submit(len(jobs.open) + 1)
    until(jobs.have_ended, 60 + LEASE_S, "every job is final after a reload")


def _job(connection: Connection, job_id: str) -> dict[str, Any]:
    answer = connection.exchange(request_bytes("GET", f"/jobs/{job_id}"))
    if answer.status != 200:
        return {"state": f"answered with {answer.status}"}
    job: dict[str, Any] = answer.document()
    return job


def _serves(connection: Connection) -> bool:
    return connection.exchange(request_bytes("GET", "/health/ready")).status == 200


def hide_foreign_jobs(context: Context, findings: Findings) -> None:
    """S10. Ids of another key's jobs, and unknown ids, in turn; their times by Mann and Whitney's test."""
    _, endpoint, keys = keyed_instance(context)
    num_ids = context.amount(50, 1000)
    rng = random.Random(context.seed)
    faults = Counter[str]()
    times_ms: dict[str, list[float]] = {"foreign": [], "unknown": []}
    with Connection(endpoint) as connection:
        own = [
            connection.exchange(job_request(number, key=keys["other"], length=1)).document()["id"]
            for number in range(20)
        ]
        until(
            lambda: all(_job_as(connection, "GET", i, keys["other"]).document()["state"] in FINAL for i in own), 30, ""
        )
        for number in range(2 * num_ids):
            kind = ("foreign", "unknown")[number % 2]
            method = "DELETE" if number % 10 < 2 else "GET"
            job_id = rng.choice(own) if kind == "foreign" else _unlike(rng.choice(own), rng)
            answer = _job_as(connection, method, job_id, keys["operator"])
            body = {name: value for name, value in answer.document().items() if name != "request_id"}
            faults[f"{answer.status} {json.dumps(body, sort_keys=True)}"] += 1
            if method == "GET":
                times_ms[kind].append(1e3 * answer.seconds)
        states = Counter(_job_as(connection, "GET", i, keys["other"]).status for i in own)
    findings.figures |= {"foreign ids": num_ids, "unknown ids": num_ids}
    findings.at_most("different answers", len(faults), 1)
    findings.require(all(text.startswith("404 ") for text in faults), f"answers {dict(faults)}")
    findings.none_of("own jobs that changed", {f"{s}": n for s, n in states.items() if s != 200})
    test = mannwhitneyu(times_ms["foreign"], times_ms["unknown"])
    for kind, values in times_ms.items():
        findings.figures[f"{kind}: median ms"] = statistics.median(values)
    findings.at_least("probability of these times by chance", float(test.pvalue), SIGNIFICANCE)


def _job_as(connection: Connection, method: str, job_id: str, key: str) -> Answer:
    return connection.exchange(request_bytes(method, f"/jobs/{job_id}", headers={"Authorization": f"Bearer {key}"}))


def _unlike(job_id: str, rng: random.Random) -> str:
    return "".join(rng.sample(job_id, len(job_id)))
