"""The file of the embedded job store: deleted, replaced, damaged, on a full disk, and read by others."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gateway.jobs.queue import JobQueue
from gateway.jobs.sqlite import SqliteStore
from shared.errors import JobsUnavailable, UnknownJob

CANARY = b"canary-77d0c1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d" / "jobs.sqlite3"


@pytest.fixture
def queue(path: Path) -> Iterator[JobQueue]:
    queue = make_queue(path)
    yield queue
    queue.close()


def make_queue(path: Path) -> JobQueue:
    return JobQueue(SqliteStore(path), ttl_s=3600.0, max_open=100)


def finish_one(queue: JobQueue, result: bytes = b"1") -> str:
    job = queue.lease()
    assert job is not None
    assert queue.finish(job, "succeeded", result=result)
    return job.id


def files(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}*"))


def remove_files(path: Path) -> None:
    for file in files(path):
        file.unlink()


def remove_directory(path: Path) -> None:
    shutil.rmtree(path.parent)


def move(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


def replace_by_a_backup(path: Path) -> None:
    """As an operator does who stops nothing: another file, with a job of its own, takes its place."""
    other = make_queue(path.with_name("backup"))
    other.submit("o", b'"backup"')
    other.close()
    path.with_name("backup").rename(path)


def replace_by_an_empty_file(path: Path) -> None:
    remove_files(path)
    path.touch()


LOSSES = (remove_files, os.unlink, remove_directory, move, replace_by_a_backup, replace_by_an_empty_file)


@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_file_is_reported_with_the_number_of_its_jobs_and_made_anew(
    path: Path, queue: JobQueue, lose: Callable[[Path], None]
) -> None:
    """By each process that had it open. Where the log beside it was left, only the first still reads the old number."""
    lost = [queue.submit("o", b"{}")[0] for _ in range(2)]
    finish_one(queue)
    second = make_queue(path)
    second.num_open()
    lose(path)
    queues = (queue, second)
    with capture_logs() as logs:
        accepted = [each.submit("o", b"{}")[0] for each in queues]
    assert [entry["event"] for entry in logs] == ["job_file_lost"] * 2
    assert logs[0]["jobs"] == 2
    for each in queues:
        assert [each.find(job.id, "o").state for job in accepted] == ["queued"] * 2
        for job in lost:
            with pytest.raises(UnknownJob):
                each.find(job.id, "o")
        each.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_file_lost_after_the_last_use_is_reported_at_the_end(path: Path) -> None:
    queue = make_queue(path)
    queue.submit("o", b"{}")
    remove_files(path)
    with capture_logs() as logs:
        queue.close()
    assert [(entry["event"], entry["jobs"]) for entry in logs] == [("job_file_lost", 1)]


def test_a_lost_file_is_reported_once_also_while_none_can_be_made(path: Path, queue: JobQueue) -> None:
    queue.submit("o", b"{}")
    remove_directory(path)
    path.parent.touch()  # no directory can be made here
    with capture_logs() as logs:
        for _ in range(2):
            with pytest.raises(JobsUnavailable):
                queue.num_open()
        path.parent.unlink()
        assert queue.num_open() == 0
    assert [entry["event"] for entry in logs] == ["job_file_lost"]


@pytest.mark.parametrize("content", [b"", b"no database " * 1000, os.urandom(40_000)])
def test_a_file_overwritten_in_place_is_reported_and_can_be_removed(
    path: Path, queue: JobQueue, content: bytes
) -> None:
    queue.submit("o", b"{}")
    queue.close()
    queue = make_queue(path)
    queue.num_open()
    path.write_bytes(content)
    try:
        queue.submit("o", b"{}")
    except JobsUnavailable:
        remove_files(path)
    job = queue.submit("o", b"{}")[0]
    assert queue.find(job.id, "o").state == "queued"
    queue.close()


def test_a_new_file_is_opened_while_another_process_creates_it(path: Path) -> None:
    """SQLite does not wait where it switches a file to WAL: it refuses one of two processes at once."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path, isolation_level=None)) as other, ThreadPoolExecutor(1) as pool:
        other.execute("BEGIN IMMEDIATE")
        store = SqliteStore(path)
        opened = pool.submit(store.num_open)
        assert wait([opened], 0.1).not_done
        other.execute("ROLLBACK")
        assert opened.result(5) == 0
        store.close()


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_reported_and_free_again_all_goes_on(path: Path, queue: JobQueue) -> None:
    waiting = queue.submit("o", b"{}")[0]
    with full_disk():
        for _ in range(2):
            with pytest.raises(JobsUnavailable):
                queue.submit("o", b"{}" + b" " * 100_000)
        with pytest.raises(JobsUnavailable):
            make_queue(path.with_name("other")).num_open()
    later = queue.submit("o", b"{}")[0]
    assert [finish_one(queue), finish_one(queue)] == [waiting.id, later.id]


@contextmanager
def reader(path: Path) -> Iterator[None]:
    """Another process that has begun to read, as a backup does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM jobs").fetchone()
        yield


def held(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in files(path))


@pytest.mark.parametrize("end", ["finish", "cancel", "expire", "delete", "damaged"])
def test_a_prompt_that_was_being_read_is_erased_as_soon_as_it_is_not(path: Path, end: str) -> None:
    """An idle server's polls do it."""
    now = [1000.0]
    queue = JobQueue(SqliteStore(path), ttl_s=3600.0, max_open=100, clock=lambda: now[0])
    job = queue.submit("o", CANARY)[0]
    if end == "delete":
        finish_one(queue, CANARY)
    with reader(path):
        if end == "finish":
            finish_one(queue)
        elif end in {"cancel", "delete"}:
            queue.cancel_or_delete(job.id, "o")
        elif end == "expire":
            now[0] += 3601
            assert queue.purge() == 1
        else:
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute("UPDATE jobs SET data = ?", (b"\xc1" + CANARY,))
            assert queue.lease() is None
            now[0] = 1e12
            queue.purge()
        assert CANARY in held(path)
    queue.num_open()
    assert CANARY not in held(path)
    queue.close()


def test_what_a_killed_process_could_not_erase_the_next_one_does(path: Path, queue: JobQueue) -> None:
    queue.submit("o", CANARY)
    with reader(path):
        finish_one(queue)
        copy = path.parent / "copy"
        copy.mkdir()
        for file in files(path):
            shutil.copy(file, copy)
    assert CANARY in held(copy / path.name)
    after = make_queue(copy / path.name)
    after.num_open()
    assert CANARY not in held(copy / path.name)
    after.close()


def test_a_file_of_a_later_version_is_refused_and_left_as_it_is(path: Path) -> None:
    """One of an earlier version, which has no number, is used."""
    queue = make_queue(path)
    job, _ = queue.submit("o", b"{}")
    queue.close()
    for form in (0, 1):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {form}")
        again = make_queue(path)
        assert again.find(job.id, "o").id == job.id
        again.close()
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 2")
    before = path.read_bytes()
    with pytest.raises(JobsUnavailable, match="later version of Tercet"):
        make_queue(path).find(job.id, "o")
    assert path.read_bytes() == before
