"""The time of day may jump: no job waits longer, is leased twice or erased early. One suite over the three stores."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.jobs import sqlite
from gateway.jobs.queue import JobQueue
from gateway.jobs.sqlite import SqliteStore
from gateway.jobs.store import JobStore
from tests.e2e.harness import until

JUMPS_S = (-86_400.0, -3600.0, 3600.0, 86_400.0)


def shift_time_of_day(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)


def make_queue(store: JobStore) -> JobQueue:
    return JobQueue(store, ttl_s=1800.0, max_open=100)


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
def test_a_boot_with_another_time_of_day_does_not_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    store = SqliteStore(tmp_path / "jobs.sqlite3")
    before = store.now()
    job = make_queue(store).submit("o", b"{}")[0]
    store.close()
    monkeypatch.setattr(sqlite, "_boot_id", lambda: "another boot")
    uptime = sqlite._uptime()
    monkeypatch.setattr(sqlite, "_uptime", lambda: time.monotonic() - uptime / 2)
    shift_time_of_day(monkeypatch, jump_s)
    again = SqliteStore(tmp_path / "jobs.sqlite3")
    assert again.now() >= before - sqlite.SEEN_S  # what was written last may be so old
    if jump_s < 0:
        leased = until(make_queue(again).lease, 10, "the job, due as long after the start as it was before")
        assert leased.id == job.id
    again.close()


@pytest.mark.parametrize("row", ["('x', 'y', 'z')", "('', 9e999, -9e999)", "('b', NULL, 1)", "(x'ff', x'00', x'00')"])
def test_a_damaged_clock_is_set_anew(tmp_path: Path, row: str) -> None:
    path = tmp_path / "jobs.sqlite3"
    first = SqliteStore(path)
    first.num_open()
    first.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE clock")
        connection.execute("CREATE TABLE clock (id INTEGER PRIMARY KEY, boot, epoch, seen)")
        connection.execute(f"INSERT INTO clock SELECT 1, * FROM (VALUES {row})")
    connection.close()
    store = SqliteStore(path)
    assert abs(store.now() - time.time()) < 60
    assert store.insert(make_queue(store).submit("o", b"{}")[0]) is False
    store.close()
