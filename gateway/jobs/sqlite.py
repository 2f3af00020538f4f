"""Jobs in a SQLite file: the embedded store, for the gateways of one machine.

A transaction is on the disk when a method returns (WAL, `synchronous=FULL`). What is erased is overwritten with zeros
(`secure_delete`), also in the write-ahead log, which is truncated.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.jobs.store import Job, Queue, decode_job, encode_job
from shared.errors import JobsUnavailable

# How long a write waits for another process, and a thread for the connection: a third of a lease, so that a renewal
# that fails can be repeated.
BUSY_TIMEOUT_S = 2.0
# Pause before another attempt to open a file that another process is switching to WAL.
OPEN_PAUSE_S = 0.01
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, version INTEGER NOT NULL, owner TEXT NOT NULL, idempotency TEXT UNIQUE,
    queue TEXT NOT NULL, due_at REAL NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_due ON jobs (queue, due_at);
CREATE INDEX IF NOT EXISTS jobs_owner ON jobs (owner) WHERE queue = 'open';
"""


class SqliteStore:
    """A `JobStore`. The file is created at the first use, readable by its user alone."""

    max_bytes: int | None = None
    max_calls = 1  # the file has one writer at a time

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def insert(self, job: Job) -> bool:
        row = (job.id, job.version, job.owner, job.idempotency or None, job.queue, job.due_at, encode_job(job))
        with self._connected() as connection:
            statement = "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            return connection.execute(statement, row).rowcount == 1

    def read(self, job_id: str) -> Job | None:
        with self._connected() as connection:
            row = connection.execute("SELECT data FROM jobs WHERE id = ?", (job_id,)).fetchone()
        return None if row is None else decode_job(row[0])

    def find_idempotent(self, idempotency: str) -> str | None:
        with self._connected() as connection:
            row = connection.execute("SELECT id FROM jobs WHERE idempotency = ?", (idempotency,)).fetchone()
        return None if row is None else str(row[0])

    def replace(self, old: Job, new: Job) -> bool:
        row = (new.version, new.idempotency or None, new.queue, new.due_at, encode_job(new), old.id, old.version)
        with self._connected() as connection:
            statement = (
                "UPDATE jobs SET version = ?, idempotency = ?, queue = ?, due_at = ?, data = ? "
                "WHERE id = ? AND version = ?"
            )
            is_replaced = connection.execute(statement, row).rowcount == 1
            if is_replaced and ((old.request and not new.request) or (old.result and not new.result)):
                _truncate_log(connection)
        return is_replaced

    def delete(self, job: Job) -> bool:
        with self._connected() as connection:
            statement = "DELETE FROM jobs WHERE id = ? AND version = ?"
            is_deleted = connection.execute(statement, (job.id, job.version)).rowcount == 1
            if is_deleted:
                _truncate_log(connection)
        return is_deleted

    def due(self, queue: Queue, until: float, limit: int) -> list[str]:
        with self._connected() as connection:
            statement = "SELECT id FROM jobs WHERE queue = ? AND due_at <= ? ORDER BY due_at LIMIT ?"
            return [row[0] for row in connection.execute(statement, (queue, until, limit))]

    def num_open(self, owner: str | None = None) -> int:
        statement = "SELECT count(*) FROM jobs WHERE queue = 'open'"
        with self._connected() as connection:
            if owner is None:
                return int(connection.execute(statement).fetchone()[0])
            return int(connection.execute(f"{statement} AND owner = ?", (owner,)).fetchone()[0])

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """The connection, in which each statement is a transaction.

        Raises:
            JobsUnavailable: the file cannot be opened, read or written, or another thread uses it for too long.
        """
        if not self._lock.acquire(timeout=BUSY_TIMEOUT_S):
            raise JobsUnavailable("The job store of this server is locked by another process; try again shortly.")
        try:
            if self._connection is None:
                self._connection = _open(self._path)
            yield self._connection
        except (sqlite3.Error, OSError) as error:
            raise JobsUnavailable(
                "The job store of this server cannot be used: its file (TERCET_JOBS) must be writable.",
            ) from error
        finally:
            self._lock.release()


def _open(path: Path) -> sqlite3.Connection:
    """A connection to the file, also while others create it.

    SQLite does not wait for a lock while it switches a file to WAL: it refuses one of two processes at once
    (sqlite.org/wal.html, "Sometimes Queries Return SQLITE_BUSY In WAL Mode").

    Raises:
        sqlite3.Error, OSError: the file cannot be opened, or was locked for `BUSY_TIMEOUT_S`.
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
    try:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _truncate_log(connection: sqlite3.Connection) -> None:
    """Move the log into the file and empty it. Where another process reads, a later call does it."""
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
