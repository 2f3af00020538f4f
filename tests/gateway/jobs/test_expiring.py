"""Jobs that expire together hold nothing up."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.jobs import executor as executor_module
from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from gateway.jobs.store import Job
from tests.e2e.harness import until
from tests.gateway.jobs.conftest import Clock, MakeQueue


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
