"""Jobs in a SQLite file: the embedded store, for the gateways of one machine.

A transaction is on the disk when a method returns (WAL, `synchronous=FULL`). What is erased is overwritten with zeros
(`secure_delete`), also in the write-ahead log, which is truncated, again and again while another process reads.

The clock is the machine's time since its boot, so that jobs do not notice when the time of day jumps. The file holds
what to add to it, which is determined once for each boot, and when it was last used: it does not go back with the
machine's clock at a boot.

A file that is deleted or replaced while it is used is noticed at the next use, and its jobs are written to the new one.
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

from gateway.jobs.store import REMEMBERED_S, DamagedRecord, Job, Queue, decode_record, encode_job, log_damaged
from shared.errors import JobsUnavailable

# How long a write waits for another process, and a thread for the connection: a third of a lease, so that a renewal
# that fails can be repeated.
BUSY_TIMEOUT_S = 2.0
# Pause before another attempt to open a file that another process is switching to WAL.
OPEN_PAUSE_S = 0.01
# How often the file notes that it is used.
SEEN_S = 600.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# The form of the file, one more where an earlier version could not use it any more (SQLite's `user_version`).
_FORM = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, version INTEGER NOT NULL, owner TEXT NOT NULL, idempotency TEXT UNIQUE,
    queue TEXT NOT NULL, due_at REAL NOT NULL, data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_due ON jobs (queue, due_at);
CREATE INDEX IF NOT EXISTS jobs_owner ON jobs (owner) WHERE queue = 'open';
CREATE TABLE IF NOT EXISTS clock (
    id INTEGER PRIMARY KEY CHECK (id = 1), boot TEXT NOT NULL, epoch REAL NOT NULL, seen REAL NOT NULL
);
"""
# A job of the lost file, unless the new one has a later version of it. The job that is there keeps its key.
_RESTORE = """
INSERT INTO jobs VALUES (
    ?1, ?2, ?3, CASE WHEN EXISTS (SELECT 1 FROM jobs WHERE idempotency = ?4 AND id != ?1) THEN NULL ELSE ?4 END,
    ?5, ?6, ?7
)
ON CONFLICT (id) DO UPDATE SET version = ?2, idempotency = excluded.idempotency, queue = ?5, due_at = ?6, data = ?7
WHERE ?2 > version
"""
_DAMAGED = "damaged"  # the queue of records that were set aside
_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
log = structlog.get_logger()


class SqliteStore:
    """A `JobStore`. The file is created at the first use, readable by its user alone."""

    max_bytes: int | None = None
    max_calls = 1  # the file has one writer at a time

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # device and inode of the file that is open
        self._rescued: list[tuple[Any, ...]] = []  # rows of a lost file that no other file has yet
        self._must_empty_log = True  # of a process that ended before it could
        self._epoch: float | None = None  # to be added to `_uptime`
        self._seen = 0.0

    def now(self) -> float:
        if self._epoch is None:
            with self._connected():
                pass
        assert self._epoch is not None
        return _uptime() + self._epoch

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
            statement = "SELECT rowid, id FROM jobs WHERE queue = ? AND due_at <= ? ORDER BY due_at LIMIT ?"
            while True:
                rows = connection.execute(statement, (queue, until, limit)).fetchall()
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
            if self._connection is not None and _identity(self._path) != self._file:
                self._give_up_file("it was deleted or replaced")
            if self._connection is None:
                self._connection = self._open()
            yield self._connection
            self._tend(self._connection)
        except (sqlite3.Error, OSError) as error:
            code = error.sqlite_errorcode & 0xFF if isinstance(error, sqlite3.DatabaseError) else 0
            if self._connection is not None and code in _DAMAGE_CODES:
                self._give_up_file("it is damaged")
            raise JobsUnavailable(
                "The job store of this server cannot be used: its file (TERCET_JOBS) must be writable.",
            ) from error
        finally:
            self._lock.release()

    def _open(self) -> sqlite3.Connection:
        """
        Raises:
            sqlite3.Error, OSError: as `_open`, or the rows that were rescued cannot be written.
        """
        connection = _open(self._path)
        try:
            self._file = _identity(self._path)
            self._set_clock(connection)
            if self._rescued:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(_RESTORE, self._rescued)
                connection.execute("COMMIT")
                log.warning("jobs_restored", jobs=len(self._rescued))
                self._rescued = []
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_up_file(self, reason: str) -> None:
        """Take the jobs out of the file that is open, and close it. SQLite still reads a file without a name.

        It must be closed before the new one is opened: their `-shm` file may be the same.
        """
        assert self._connection is not None
        rows: list[tuple[Any, ...]] | None = None
        with suppress(sqlite3.Error):
            rows = self._connection.execute("SELECT * FROM jobs").fetchall()
        log.error("job_file_lost", reason=reason, jobs="unreadable" if rows is None else len(rows))
        self._rescued += rows or []
        self._connection.close()
        self._connection = None

    def _set_clock(self, connection: sqlite3.Connection) -> None:
        """Read the clock's epoch; the first process after a boot writes it."""
        if (epoch := _stored_epoch(connection)) is None:
            connection.execute("BEGIN IMMEDIATE")
            if (epoch := _stored_epoch(connection)) is None:
                uptime = _uptime()
                epoch = self._epoch
                if epoch is None:
                    epoch = max(time.time(), _last_seen(connection)) - uptime
                row = (_boot_id(), epoch, uptime + epoch)
                connection.execute("INSERT OR REPLACE INTO clock VALUES (1, ?, ?, ?)", row)
            connection.execute("COMMIT")
        self._epoch = epoch

    def _tend(self, connection: sqlite3.Connection) -> None:
        """What is left to do after any use: no failure of it matters now."""
        if self._must_empty_log:
            self._must_empty_log = not _empty_log(connection)
        now = self._seen if self._epoch is None else _uptime() + self._epoch
        if now - self._seen >= SEEN_S:
            self._seen = now
            with suppress(sqlite3.Error):
                connection.execute("UPDATE clock SET seen = ?", (now,))

    def _ids(self, connection: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> Iterator[str]:
        """The ids of rows of (rowid, id)."""
        for rowid, job_id in rows:
            if isinstance(job_id, str):
                yield job_id
            else:
                self._set_aside(connection, rowid, job_id)

    def _set_aside(self, connection: sqlite3.Connection, rowid: int, job_id: object) -> None:
        statement = "UPDATE jobs SET queue = ?1, idempotency = NULL, due_at = ?2 WHERE rowid = ?3 AND queue != ?1"
        until = _uptime() + (self._epoch or 0.0) + REMEMBERED_S
        if connection.execute(statement, (_DAMAGED, until, rowid)).rowcount == 1:
            log_damaged(job_id)


def _stored_epoch(connection: sqlite3.Connection) -> float | None:
    """The clock's epoch, if it was written since the boot of this machine."""
    row = connection.execute("SELECT epoch FROM clock WHERE boot = ? AND boot != ''", (_boot_id(),)).fetchone()
    return row[0] if row is not None and isinstance(row[0], float) and math.isfinite(row[0]) else None


def _last_seen(connection: sqlite3.Connection) -> float:
    row = connection.execute("SELECT seen FROM clock").fetchone()
    return row[0] if row is not None and isinstance(row[0], float) and math.isfinite(row[0]) else 0.0


def _uptime() -> float:
    """Seconds since the machine was booted, also of its sleep, the same in all processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _boot_id() -> str:
    """Changes with each boot of the machine. Empty: it is not known."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
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
