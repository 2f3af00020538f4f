"""The time of day may jump. With Redis and DynamoDB no job waits longer, is leased twice or erased early; with SQLite
each still has one final state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.jobs.queue import JobQueue
from gateway.jobs.sqlite import SqliteStore
from gateway.jobs.store import JobStore
from tests.e2e.harness import until
from tests.gateway.jobs.conftest import OTHER_STORES

JUMPS_S = (-86_400.0, -3600.0, 3600.0, 86_400.0)


def shift_time_of_day(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)


def make_queue(store: JobStore) -> JobQueue:
    return JobQueue(store, ttl_s=1800.0, max_open=100)


@pytest.mark.parametrize("store_url", OTHER_STORES, indirect=True)
@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_jobs_do_not_notice_a_jump(
    open_again: Callable[[], JobStore], monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """A gateway that runs, and one that is started after the jump."""
    running = make_queue(open_again())
    done, queued, leased = (running.submit("o", b"{}")[0] for _ in range(3))
    first = running.lease()
    assert first is not None
    assert first.id == done.id
    assert running.finish(first, "succeeded", result=b"1")
    second = running.lease()
    assert second is not None
    assert second.id == queued.id
    assert running.put_back(second, 0.0)
    third = running.lease()
    assert third is not None
    shift_time_of_day(monkeypatch, jump_s)
    late = make_queue(open_again())
    for queue in (running, late):
        assert queue.purge() == 0
        assert queue.find(done.id, "o").result == b"1"
        assert queue.find(leased.id, "o").state in {"queued", "running"}
    fourth = until(late.lease, 10, "DynamoDB's clock is known to the second")
    assert fourth.id != third.id
    assert running.renew(third)
    assert late.lease() is None
    created = [queue.submit("o", b"{}")[0].created_at for queue in (running, late)]
    assert abs(created[0] - created[1]) < 60


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_a_jump_leaves_each_job_of_a_file_one_final_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Whether the clock is set forward or back: a lease ends early, no job is stuck, one result of each is stored."""
    running, late = (JobQueue(SqliteStore(tmp_path / "jobs.sqlite3"), ttl_s=1e6, max_open=100) for _ in range(2))
    ids = {running.submit("o", b"{}")[0].id for _ in range(3)}
    first = running.lease()
    assert first is not None
    shift_time_of_day(monkeypatch, jump_s)
    again = []
    while (job := late.lease()) is not None:
        again.append(job)
    assert {job.id for job in again} == ids
    assert len(again) == 3
    assert not running.renew(first)
    assert not running.finish(first, "succeeded", result=b"0")
    for job in again:
        assert late.finish(job, "succeeded", result=b"1")
        assert not late.finish(job, "failed", error=b"{}")
        assert running.find(job.id, "o").result == b"1"
    assert running.num_open() == 0
    for queue in (running, late):
        queue.close()
