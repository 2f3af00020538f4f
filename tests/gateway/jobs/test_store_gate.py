"""A store that hangs gets one thread of the clients' requests; jobs that expire together hold nothing up."""

from __future__ import annotations

import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gateway.jobs import executor as executor_module
from gateway.jobs import redis_store, sqlite, store_gate
from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from gateway.jobs.store import Job
from gateway.jobs.store_gate import StoreGate
from shared.errors import JobsUnavailable
from tests.e2e.harness import until
from tests.gateway.jobs.conftest import Clock, MakeQueue
from tests.gateway.jobs.servers import RedisServer

NUM_REQUESTS = 40


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process that writes to the file, and does not finish."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield
        connection.execute("ROLLBACK")


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.integration)])
def hanging(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[JobQueue, Callable[[], AbstractContextManager[None]]]:
    """A queue, and how its store hangs. Its timeout is shorter, as is the gate's."""
    monkeypatch.setattr(store_gate, "STALL_S", 0.4)
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(redis_store, "TIMEOUT_S", 0.5)
    if request.param == "sqlite":
        path = tmp_path / "jobs.sqlite3"
        return make_queue_of(f"sqlite:{path}"), lambda: locked(path)
    server = request.getfixturevalue("redis")
    return make_queue_of(server.url), lambda: stopped(server)


def make_queue_of(url: str) -> JobQueue:
    return JobQueue(open_store(url), ttl_s=60, max_open=1000)


def test_one_thread_waits_for_a_store_that_hangs_and_the_others_are_refused(
    hanging: tuple[JobQueue, Callable[[], AbstractContextManager[None]]],
) -> None:
    """The store's lock was held over its timeout, so each request waited for those before it."""
    queue, hangs = hanging
    job, _ = queue.submit("o", b"{}")
    # No `find`: a reader of SQLite does not wait for the other process, so it would show that the store answers.
    calls: list[Callable[[], Any]] = [
        lambda: queue.submit("o", b"{}"),
        lambda: queue.cancel_or_delete(job.id, "o"),
    ]
    with hangs():
        with pytest.raises(JobsUnavailable):
            calls[0]()  # its timeout has shown that the store hangs
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            futures = [pool.submit(calls[number % 2]) for number in range(NUM_REQUESTS)]
            # One of them waits for its timeout.
            until(lambda: sum(future.done() for future in futures) >= NUM_REQUESTS - 1, 20, "refusals of the others")
    refusals = [future.exception() for future in futures]
    assert all(isinstance(refusal, JobsUnavailable) for refusal in refusals)
    assert all(refusal.headers["Retry-After"] for refusal in refusals if isinstance(refusal, JobsUnavailable))
    until(lambda: not is_refused(queue), 20, "an answer, once the store answers")
    queue.close()


def is_refused(queue: JobQueue) -> bool:
    try:
        queue.find("x" * 24, "o")
    except JobsUnavailable:
        return True
    except Exception:  # noqa: BLE001 - the store has answered
        return False
    return False


def test_a_call_in_progress_for_too_long_refuses_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hang of all: no call has ended yet that would show it."""
    monkeypatch.setattr(store_gate, "STALL_S", 0.3)
    gate, is_in, is_over = StoreGate(1), threading.Event(), threading.Event()

    def hang() -> None:
        with gate.entering():
            is_in.set()
            is_over.wait()

    thread = threading.Thread(target=hang)
    with capture_logs() as logs:
        thread.start()
        is_in.wait()
        with pytest.raises(JobsUnavailable), gate.entering():
            pass
        is_over.set()
        thread.join()
    assert [entry["event"] for entry in logs] == ["job_store_hangs"]
    assert logs[0]["seconds"] >= 0.3
    monkeypatch.undo()
    with gate.entering():  # the thread is free again, and finds out that the store answers
        pass
    with ThreadPoolExecutor(8) as pool:  # calls of a store that answers take turns
        assert list(pool.map(lambda _: enters(gate), range(64))) == [True] * 64


def test_calls_after_a_hang_that_is_over_wait_for_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes after a hang, the first calls at the same time were refused but for one."""
    monkeypatch.setattr(store_gate, "STALL_S", 0.0)
    gate = StoreGate(4)
    with gate.entering():
        time.sleep(0.01)  # a hang
    monkeypatch.undo()
    monkeypatch.setattr(store_gate, "TRIAL_S", 10.0)  # not the machine's speed is tested
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: enters(gate, 0.01), range(8))) == [True] * 8


def enters(gate: StoreGate, seconds: float = 0.0) -> bool:
    with gate.entering():
        time.sleep(seconds)
        return True


class RecordingQueue(JobQueue):
    """Records what happens to jobs, renewals included."""

    def __init__(self, url: str, clock: Clock, events: list[str]) -> None:
        super().__init__(open_store(url), ttl_s=60, max_open=1000, count=events.append, clock=clock)
        self._events = events

    def renew(self, job: Job) -> bool:
        self._events.append("renewed")
        return super().renew(job)


@pytest.mark.parametrize("kinds", [("final",), ("open",), ("final", "open")], ids="-".join)
def test_leases_go_on_while_many_jobs_expire(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    """All of them were erased first. Without results to erase, a lease gave up after 80 and waited for its next poll.

    While the others expire, the executor renews; it does not wait for its next poll in between.
    """
    events: list[str] = []
    url = f"sqlite:{tmp_path}/jobs.sqlite3"
    queue = RecordingQueue(url, clock, events)
    running, is_over = threading.Event(), threading.Event()

    def compute(job: Job, _: Any) -> bytes:
        if job.request == b'"long"':
            running.set()
            is_over.wait()
        return b"1"

    num_expired = 100  # more than a lease lists
    for kind in kinds:
        for _ in range(num_expired // len(kinds)):
            job, _ = queue.submit("o", b'"expires"')
            if kind == "final":
                queue.cancel_or_delete(job.id, "o")
    clock.offset_s += 61
    long, _ = queue.submit("o", b'"long"')
    monkeypatch.setattr(executor_module, "POLL_S", 0.0)  # renewals in each turn
    executor = JobExecutor(queue, num_threads=2)
    executor.start(compute)
    try:
        if kinds == ("final",):
            assert running.wait(10)
            until(lambda: events.count("expired") == num_expired, 20, "the erasure of what has expired")
            assert "renewed" in events[events.index("started") : last(events, "expired")]
        else:
            assert running.wait(20)
        new, _ = queue.submit("o", b'"short"')
        until(lambda: queue.find(new.id, "o").state == "succeeded", 20, "the new job's end")
    finally:
        is_over.set()
        executor.stop()
        executor.join(10)
    assert long.id


def last(events: list[str], event: str) -> int:
    return len(events) - 1 - events[::-1].index(event)


def test_a_lease_that_only_erases_says_that_there_is_more(
    make_queue: MakeQueue, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.jobs.queue.ERASING_S", 0.0)
    queue = make_queue()
    for _ in range(3):
        queue.submit("o", b"{}")
    clock.offset_s += 3601
    job, _ = queue.submit("o", b"{}")
    for num_cleared in (1, 2, 3):
        assert queue.lease() is None
        assert queue.num_cleared == num_cleared
    leased = queue.lease()
    assert leased is not None
    assert leased.id == job.id
