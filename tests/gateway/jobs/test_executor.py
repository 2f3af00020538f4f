"""The executor over every store: kills, outages, cancellation, refusals, stops."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from gateway.jobs import executor as executor_module
from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import LEASE_S, JobQueue
from gateway.jobs.store import Job
from shared.call_threads import CallThreads
from shared.cancellation import Cancelling
from shared.errors import InvalidRequest, JobsUnavailable, Overloaded
from tests.e2e.harness import until
from tests.gateway.jobs.conftest import Clock, MakeQueue
from tests.gateway.jobs.servers import RedisServer, start_child

FINAL = {"succeeded", "failed", "cancelled"}
MakeExecutor = Callable[..., JobExecutor]


@pytest.fixture
def make_executor() -> Iterator[MakeExecutor]:
    """Makes and starts an executor, which is stopped at the end."""
    with ExitStack() as stack:

        def make(queue: JobQueue, compute: Any, **options: Any) -> JobExecutor:
            executor = JobExecutor(queue, **{"num_threads": 2, **options})
            executor.start(compute)
            stack.callback(executor.join, 10)
            stack.callback(executor.stop)
            return executor

        yield make


def compute_at_once(job: Job, cancelling: Cancelling) -> bytes:
    return b'"of the executor"'


class Hanging:
    """A computation that ends when it is cancelled, as one of the pool does."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cancelled = threading.Event()

    def __call__(self, job: Job, cancelling: Cancelling) -> bytes:
        with cancelling(self.cancelled.set):
            self.started.set()
            assert self.cancelled.wait(20)
        return b'"of what was ready when it was cancelled"'


def wait_for_end(queue: JobQueue, job_id: str, timeout_s: float = 10) -> Job:
    until(lambda: queue.find(job_id, "o").state in FINAL, timeout_s, "the job's final state")
    return queue.find(job_id, "o")


@pytest.mark.parametrize("moment", ["insert", "lease", "compute", "store"])
def test_a_job_whose_process_is_killed_reaches_one_final_state(
    make_queue: MakeQueue, make_executor: MakeExecutor, store_url: str, clock: Clock, moment: str
) -> None:
    with start_child(store_url, moment) as child:
        assert child.stdout is not None
        job_id = child.stdout.readline().strip()
        announced = child.stdout.readline().strip()
        child.send_signal(signal.SIGKILL)
    assert announced == moment
    clock.offset_s += LEASE_S + 1
    counts = Counter[str]()
    computed = []

    def compute(job: Job, cancelling: Cancelling) -> bytes:
        computed.append(job.id)
        return b'"of the executor"'

    executor = make_executor(make_queue(count=lambda event: counts.update([event])), compute)
    queue = make_queue()
    job = wait_for_end(queue, job_id)
    executor.stop()
    executor.join(10)
    result = b'"of the killed process"' if moment == "store" else b'"of the executor"'
    assert (job.state, job.result, job.request) == ("succeeded", result, b"")
    assert len(computed) == counts["succeeded"] == (moment != "store")
    assert queue.find(job_id, "o") == job


@pytest.mark.integration
def test_jobs_survive_a_killed_redis(redis: RedisServer, make_executor: MakeExecutor) -> None:
    """Redis is killed twice while jobs are submitted and computed. What it confirmed is there, and ends once."""
    queue = JobQueue(open_store(redis.url), ttl_s=60, max_open=1000)
    counts = Counter[str]()
    finished = JobQueue(open_store(redis.url), ttl_s=60, max_open=1000, count=lambda event: counts.update([event]))

    def compute(job: Job, cancelling: Cancelling) -> bytes:
        time.sleep(0.01)
        return job.request

    make_executor(finished, compute)
    accepted: list[str] = []
    num_unconfirmed = 0

    def kill_and_restart() -> None:
        for _ in range(2):
            time.sleep(0.4)
            redis.kill()
            time.sleep(0.2)
            redis.start()

    killer = threading.Thread(target=kill_and_restart)
    killer.start()
    while killer.is_alive():
        try:
            accepted.append(queue.submit("", b"%d" % len(accepted))[0].id)
        except JobsUnavailable:
            num_unconfirmed += 1
        time.sleep(0.01)
    killer.join()
    until(lambda: queue.num_open() == 0, 30, "all jobs are final")
    jobs = [queue.find(job_id, "") for job_id in accepted]
    assert [(job.state, job.result) for job in jobs] == [
        ("succeeded", b"%d" % number) for number in range(len(accepted))
    ]
    assert len(accepted) > 10
    # A job or a result whose confirmation was lost may be stored: that job is computed, that result is not counted.
    assert 0 < counts["succeeded"] <= len(accepted) + num_unconfirmed
    queue.close()


@pytest.fixture
def fast_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "POLL_S", 0.2)


def make_sqlite_queue(directory: Path) -> JobQueue:
    return JobQueue(open_store(f"sqlite:{directory}/jobs.sqlite3"), ttl_s=60, max_open=100)


@pytest.fixture
def sqlite_queue(tmp_path: Path) -> Iterator[JobQueue]:
    """The queue of another process, for what does not depend on the store."""
    queue = make_sqlite_queue(tmp_path)
    yield queue
    queue.close()


@pytest.fixture
def job(sqlite_queue: JobQueue) -> Job:
    """A job in that queue."""
    return sqlite_queue.submit("o", b"{}")[0]


@pytest.fixture
def execute(tmp_path: Path, make_executor: MakeExecutor) -> MakeExecutor:
    """Makes and starts the executor of another process over the same store."""

    def make(compute: Any, **options: Any) -> JobExecutor:
        return make_executor(make_sqlite_queue(tmp_path), compute, **options)

    return make


@pytest.mark.usefixtures("fast_poll")
def test_a_lease_is_renewed_until_another_process_cancels_the_job(
    sqlite_queue: JobQueue, job: Job, execute: MakeExecutor
) -> None:
    hanging = Hanging()
    execute(hanging)
    assert hanging.started.wait(5)
    due_at = sqlite_queue.find(job.id, "o").due_at
    until(lambda: sqlite_queue.find(job.id, "o").due_at > due_at + 0.1, 5, "a renewal")
    sqlite_queue.cancel_or_delete(job.id, "o")
    assert hanging.cancelled.wait(4)


def test_a_stop_returns_the_running_jobs_at_once(sqlite_queue: JobQueue, job: Job, execute: MakeExecutor) -> None:
    hanging = Hanging()
    executor = execute(hanging)
    assert hanging.started.wait(5)
    executor.stop()
    executor.join(2)
    found = sqlite_queue.find(job.id, "o")
    assert (found.state, found.attempts, found.request) == ("queued", 0, b"{}")
    execute(compute_at_once)
    assert wait_for_end(sqlite_queue, job.id, 2).result == b'"of the executor"'


def test_a_refused_job_is_tried_again(
    sqlite_queue: JobQueue, job: Job, execute: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "REFUSED_DELAY_S", 0.05)
    refusals = iter([Overloaded("full")])

    def compute(job: Job, cancelling: Cancelling) -> bytes:
        for refusal in refusals:
            raise refusal
        return b"1"

    execute(compute)
    ended = wait_for_end(sqlite_queue, job.id)
    assert (ended.state, ended.attempts, next(refusals, None)) == ("succeeded", 1, None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("stop is wrong."), b'"invalid_request"'),
        (KeyError("bug"), b"internal_error"),
        (BaseException("bug"), b"internal_error"),  # a panic in Rust is one
    ],
)
def test_an_error_of_any_class_is_the_outcome_and_the_job_is_not_tried_again(
    sqlite_queue: JobQueue, job: Job, execute: MakeExecutor, error: BaseException, code: bytes
) -> None:
    calls: list[Job] = []

    def compute(job: Job, cancelling: Cancelling) -> bytes:
        calls.append(job)
        raise error

    with structlog.testing.capture_logs() as logs:
        execute(compute)
        ended = wait_for_end(sqlite_queue, job.id)
    assert (ended.state, len(calls)) == ("failed", 1)
    assert code in ended.error
    assert b"bug" not in ended.error
    assert ("unhandled_exception" in {event["event"] for event in logs}) is (code == b"internal_error")


def test_a_job_for_which_no_thread_can_be_started_returns_to_the_queue(
    sqlite_queue: JobQueue, job: Job, execute: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake for the limit of threads."""
    monkeypatch.setattr(executor_module, "REFUSED_DELAY_S", 0.05)
    submit, refusals = CallThreads.submit, [Overloaded("No thread.")] * 2

    def refuse_twice(threads: CallThreads, function: Any, *args: Any) -> None:
        if refusals:
            raise refusals.pop()
        submit(threads, function, *args)

    monkeypatch.setattr(CallThreads, "submit", refuse_twice)
    executor = execute(compute_at_once)
    until(lambda: sqlite_queue.find(job.id, "o").state == "succeeded", 10, "the job done")
    assert not refusals
    until(lambda: not executor.num_running, 10, "none left running")


def test_no_job_starts_without_room(sqlite_queue: JobQueue, job: Job, execute: MakeExecutor) -> None:
    has_room = threading.Event()
    executor = execute(compute_at_once, has_room=has_room.is_set)
    executor.wake()
    time.sleep(0.3)
    assert sqlite_queue.find(job.id, "o").state == "queued"
    has_room.set()
    wait_for_end(sqlite_queue, job.id, 1)


def test_the_end_of_a_job_makes_room_for_the_next_at_once(
    sqlite_queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "ROOM_POLL_S", 60.0)
    ids = [sqlite_queue.submit("o", b"{}")[0].id for _ in range(3)]
    executor = JobExecutor(sqlite_queue, num_threads=2, has_room=lambda: executor.num_running < 1)
    executor.start(compute_at_once)
    try:
        assert [wait_for_end(sqlite_queue, job_id).state for job_id in ids] == ["succeeded"] * 3
    finally:
        executor.stop()
        executor.join(10)


def test_at_most_num_threads_jobs_run(sqlite_queue: JobQueue, execute: MakeExecutor) -> None:
    room, both = threading.Semaphore(2), threading.Barrier(2)

    def compute(job: Job, cancelling: Cancelling) -> bytes:
        assert room.acquire(blocking=False)
        both.wait(5)
        room.release()
        return b"1"

    ids = [sqlite_queue.submit("o", b"{}")[0].id for _ in range(6)]
    execute(compute)
    assert [wait_for_end(sqlite_queue, job_id).state for job_id in ids] == ["succeeded"] * 6


@pytest.mark.usefixtures("fast_poll")
def test_a_store_that_cannot_be_written_refuses_and_the_executor_waits_for_it(
    tmp_path: Path, make_executor: MakeExecutor
) -> None:
    (tmp_path / "file").touch()
    queue = make_sqlite_queue(tmp_path / "file")  # a directory that is a file
    with pytest.raises(JobsUnavailable, match="TERCET_JOBS"):
        queue.submit("o", b"{}")
    with structlog.testing.capture_logs() as events:
        make_executor(make_sqlite_queue(tmp_path / "file"), compute_at_once)
        time.sleep(0.5)
        (tmp_path / "file").unlink()
        job, _ = queue.submit("o", b"{}")
        assert (tmp_path / "file" / "jobs.sqlite3").stat().st_mode & 0o777 == 0o600
        wait_for_end(queue, job.id)
    store_events = [event["event"] for event in events if event["event"].startswith("job_store")]
    assert store_events == ["job_store_failed", "job_store_recovered"]
    queue.close()
