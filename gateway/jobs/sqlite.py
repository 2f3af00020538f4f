"""Jobs in a SQLite file: the embedded store, for the gateways of one machine.

A transaction is on the disk when a method returns (WAL, `synchronous=FULL`). What is erased is overwritten with zeros
(`secure_delete`), also in the write-ahead log, which is truncated, again and again while another process reads.

The clock is the machine's time of day. A jump of it may end a lease early, or erase a result early or late; the version
check still leaves one final state.

A file that is deleted or replaced while it is used is noticed at the next use: the log says how many jobs are lost, and
a new file is made.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from gateway.jobs.store import (
    MAX_AHEAD_S,
    REMEMBERED_S,
    DamagedRecord,
    Job,
    Queue,
    decode_record,
    encode_job,
    log_damaged,
)
from shared.errors import JobsUnavailable

# How long a write waits for another process, and a thread for the connection: a third of a lease, so that a renewal
# that fails can be repeated.
BUSY_TIMEOUT_S = 2.0
# Pause before another attempt to open a file that another process is switching to WAL.
OPEN_PAUSE_S = 0.01
# The form of the file, one more where an earlier version could not use it any more (SQLite's `user_version`).
_FORM = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, version INTEGER NOT NULL, owner TEXT NOT NULL, idempotency TEXT UNIQUE,
    queue TEXT NOT NULL, due_at REAL NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_due ON jobs (queue, due_at);
CREATE INDEX IF NOT EXISTS jobs_owner ON jobs (owner) WHERE queue = 'open';
"""
_DAMAGED = "damaged"  # the queue of records that were set aside
_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
log = structlog.get_logger()


class SqliteStore:
    """A `JobStore`. The file is created at the first use, readable by its user alone."""

    max_bytes: int | None = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the file that is open
        self._must_empty_log = True  # of a process that ended before it could

    def now(self) -> float:
        return time.time()

    def insert(self, job: Job) -> bool:
        row = (job.id, job.version, job.owner, job.idempotency or None, job.queue, job.due_at, encode_job(job))
        with self._connected() as connection:
            statement = "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            return connection.execute(statement, row).rowcount == 1

    def read(self, job_id: str) -> Job | None:
        with self._connected() as connection:
            statement = "SELECT rowid, data, version, queue, due_at FROM jobs WHERE id = ? AND queue != ?"
            row = connection.execute(statement, (job_id, _DAMAGED)).fetchone()
            if row is None:
                return None
            try:
                return decode_record(row[1], id=job_id, version=row[2], queue=row[3], due_at=row[4])
            except DamagedRecord:
                self._set_aside(connection, row[0], job_id)
                return None

    def find_idempotent(self, idempotency: str) -> str | None:
        with self._connected() as connection:
            statement = "SELECT rowid, id FROM jobs WHERE idempotency = ?"
            return next(self._ids(connection, connection.execute(statement, (idempotency,)).fetchall()), None)

    def replace(self, old: Job, new: Job) -> bool:
        row = (new.version, new.idempotency or None, new.queue, new.due_at, encode_job(new), old.id, old.version)
        with self._connected() as connection:
            statement = (
                "UPDATE jobs SET version = ?, idempotency = ?, queue = ?, due_at = ?, data = ? "
                "WHERE id = ? AND version = ?"
            )
            is_replaced = connection.execute(statement, row).rowcount == 1
            if is_replaced and ((old.request and not new.request) or (old.result and not new.result)):
                self._must_empty_log = True
        return is_replaced

    def delete(self, job: Job) -> bool:
        with self._connected() as connection:
            statement = "DELETE FROM jobs WHERE id = ? AND version = ?"
            is_deleted = connection.execute(statement, (job.id, job.version)).rowcount == 1
            self._must_empty_log |= is_deleted
        return is_deleted

    def due(self, queue: Queue, until: float, limit: int) -> list[str]:
        with self._connected() as connection:
            if queue == "expired":
                statement = "DELETE FROM jobs WHERE queue = ? AND due_at <= ?"
                self._must_empty_log |= connection.execute(statement, (_DAMAGED, until)).rowcount > 0
            # As `Job.is_due`: what is open, and due later than `ahead`, is due.
            ahead = until + MAX_AHEAD_S if queue == "open" else math.inf
            statement = (
                "SELECT rowid, id FROM jobs WHERE queue = ? AND (due_at <= ? OR due_at > ?) ORDER BY due_at LIMIT ?"
            )
            while True:
                rows = connection.execute(statement, (queue, until, ahead, limit)).fetchall()
                ids = [*self._ids(connection, rows)]
                if ids or len(rows) < limit:  # else all of them were set aside
                    return ids

    def num_open(self, owner: str | None = None) -> int:
        statement = "SELECT count(*) FROM jobs WHERE queue = 'open'"
        with self._connected() as connection:
            if owner is None:
                return int(connection.execute(statement).fetchone()[0])
            return int(connection.execute(f"{statement} AND owner = ?", (owner,)).fetchone()[0])

    def close(self) -> None:
        if self._connection is not None:
            with suppress(JobsUnavailable), self._connected():  # the file may have been lost since the last use
                pass
        with self._lock:
            self._disconnect()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """The connection, in which each statement is a transaction.

        Raises:
            JobsUnavailable: the file cannot be opened, read or written, or another thread uses it for too long.
        """
        if not self._lock.acquire(timeout=BUSY_TIMEOUT_S):
            raise JobsUnavailable("The job store of this server is locked by another process; try again shortly.")
        try:
            self._notice_loss()
            if self._connection is None:
                self._connection = _open(self._path)
                self._file = _identity(self._path)
            yield self._connection
            if self._must_empty_log:
                self._must_empty_log = not _empty_log(self._connection)
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, sqlite3.DatabaseError) and error.sqlite_errorcode & 0xFF in _DAMAGE_CODES:
                self._disconnect()  # what an operator puts in its place is read anew
            raise JobsUnavailable(
                "The job store of this server cannot be used: its file (TERCET_JOBS) must be writable.",
            ) from error
        finally:
            self._lock.release()

    def _notice_loss(self) -> None:
        """If another file or none is at the path, log how many jobs were lost, and close the file.

        SQLite still reads a file without a name. It is closed before the new one is opened: their `-shm` file may be
        the same.
        """
        if self._file is None or _identity(self._path) == self._file:
            return
        num_lost: int | None = None
        if self._connection is not None:
            with suppress(sqlite3.Error):
                statement = "SELECT count(*) FROM jobs WHERE queue IN ('open', 'final')"
                [num_lost] = self._connection.execute(statement).fetchone()
        log.error("job_file_lost", jobs="unknown" if num_lost is None else num_lost)
        self._disconnect()
        self._file = None

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ids(self, connection: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> Iterator[str]:
        """The ids of rows of (rowid, id)."""
        for rowid, job_id in rows:
            if isinstance(job_id, str):
                yield job_id
            else:
                self._set_aside(connection, rowid, job_id)

    def _set_aside(self, connection: sqlite3.Connection, rowid: int, job_id: object) -> None:
        statement = "UPDATE jobs SET queue = ?1, idempotency = NULL, due_at = ?2 WHERE rowid = ?3 AND queue != ?1"
        if connection.execute(statement, (_DAMAGED, self.now() + REMEMBERED_S, rowid)).rowcount == 1:
            log_damaged(job_id)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _text(value: bytes) -> str | bytes:
    """A text of the file. One that is not UTF-8 makes no other row unreadable."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _open(path: Path) -> sqlite3.Connection:
    """A connection to the file, also while others create it.

    SQLite does not wait for a lock while it switches a file to WAL: it refuses one of two processes at once
    (sqlite.org/wal.html, "Sometimes Queries Return SQLITE_BUSY In WAL Mode").

    Raises:
        sqlite3.Error, OSError: the file cannot be opened, or was locked for `BUSY_TIMEOUT_S`.
        JobsUnavailable: a later version of Tercet wrote it.
    """
    until = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            return _connect(path)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
        time.sleep(OPEN_PAUSE_S)


def _connect(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # SQLite gives its other files this mode
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.text_factory = _text
    try:
        [found] = connection.execute("PRAGMA user_version").fetchone()
        if found > _FORM:
            raise JobsUnavailable(
                "The job file was written by a later version of Tercet: upgrade this server, or set TERCET_JOBS to "
                "another file."
            )
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(_SCHEMA)
        if found < _FORM:
            connection.execute(f"PRAGMA user_version = {_FORM}")
    except BaseException:
        connection.close()
        raise
    return connection


def _empty_log(connection: sqlite3.Connection) -> bool:
    """Move the log into the file and empty it. False: another process reads what is in it, so that a later call must do
    it. Does not wait."""
    try:
        connection.execute("PRAGMA busy_timeout = 0")
        try:
            is_busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout = {int(1e3 * BUSY_TIMEOUT_S)}")
    except sqlite3.Error:
        return False
    return not is_busy
