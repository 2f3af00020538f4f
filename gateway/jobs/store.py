"""What a job is, its states as pure functions, and the interface of a store.

A store keeps jobs and replaces one by its next version if it still has the version that was read (compare-and-set).
Every transition is such a replacement, so any number of processes may share a store. What transitions exist is known
here; when they happen, in `gateway.jobs.queue`. A record that is damaged costs its job: the store takes it out of all
queues and keeps it for a day, and everything else goes on.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec
import structlog
from msgspec import Struct
from msgspec.structs import replace

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"]
# Jobs by what can happen to them next: a lease, expiry, deletion.
Queue = Literal["open", "final", "expired"]
_QUEUES: dict[JobState, Queue] = {
    "queued": "open",
    "running": "open",
    "succeeded": "final",
    "failed": "final",
    "cancelled": "final",
    "expired": "expired",
}
# How long the id of an expired job is answered with 410, and a damaged record is kept.
REMEMBERED_S = 86_400.0
# An open job is due at its submission, or within seconds: after a pause, or at the end of a lease. One that is due
# later than this was dated before the clock was set back.
MAX_AHEAD_S = 60.0
log = structlog.get_logger()


class Job(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job as it is stored. Times are in seconds since the epoch, of the store's clock (`JobStore.now`).

    Attributes:
        version: number of this record's version; each replacement adds 1.
        owner: id of the API key, "" without keys.
        due_at: when it can be leased (queued: its turn; running: the end of its lease), expires, or can be deleted.
        expires_at: when request and result are erased.
        request: the body, JSON; empty as soon as the job is final.
        result: the answer, JSON.
        error: why it failed, as problem details (RFC 9457).
        token: the lease's token; random, so that an executor whose lease ended cannot store anything.
        attempts: leases that counted.
        idempotency: digest of owner and `Idempotency-Key`.
        fingerprint: the request's hash, keyed with the `Idempotency-Key`, which is not stored: it reveals no prompt.
    """

    id: str
    owner: str
    state: JobState
    created_at: float
    due_at: float
    expires_at: float
    version: int = 1
    request: bytes = b""
    result: bytes = b""
    error: bytes = b""
    started_at: float | None = None
    finished_at: float | None = None
    token: str = ""
    attempts: int = 0
    idempotency: str = ""
    fingerprint: str = ""

    @property
    def queue(self) -> Queue:
        return _QUEUES[self.state]

    def is_due(self, now: float) -> bool:
        """Whether an open job can be leased."""
        return self.due_at <= now or self.due_at > now + MAX_AHEAD_S

    def is_expired(self, now: float) -> bool:
        """Whether it may no longer be shown. A job does not expire while an executor has it."""
        return self.state == "expired" or (
            self.expires_at <= now and not (self.state == "running" and not self.is_due(now))
        )


class JobStore(Protocol):
    """Keeps jobs. Thread-safe; other processes may use the same data at the same time.

    What a method has returned survives the death of this process.

    Attributes:
        max_bytes: largest size of an encoded job. None for no limit but memory.

    Raises:
        JobsUnavailable: from every method: the store cannot be reached or written.
    """

    max_bytes: int | None

    def now(self) -> float:
        """Seconds since the epoch, by a clock that all processes share which use the store."""

    def insert(self, job: Job) -> bool:
        """Add a job. False: its id or its `idempotency` exists."""

    def read(self, job_id: str) -> Job | None:
        """The job. None: there is none with this id, or its record is damaged and was set aside."""

    def find_idempotent(self, idempotency: str) -> str | None:
        """The id of the job with this `idempotency`."""

    def replace(self, old: Job, new: Job) -> bool:
        """Store `new`, which is `old` with a higher version, if `old.version` is still stored."""

    def delete(self, job: Job) -> bool:
        """Remove the job, if `job.version` is still stored."""

    def due(self, queue: Queue, until: float, limit: int) -> list[str]:
        """Ids of jobs whose `due_at` is at most `until`, by `due_at`. May contain jobs that have changed meanwhile."""

    def num_open(self, owner: str | None = None) -> int:
        """Jobs that are queued or running: all, or those of an owner."""

    def close(self) -> None: ...


decode_job = msgspec.msgpack.Decoder(Job).decode
encode_job = msgspec.msgpack.Encoder().encode


class DamagedRecord(Exception):
    """What is stored of a job is not a job, or not the job that its other columns describe."""


def decode_record(data: Any, **columns: object) -> Job:
    """
    Args:
        columns: what the store keeps beside the data, by the name of the job's attribute. A job that another value
            describes would be listed and never leased, or never replaced.

    Raises:
        DamagedRecord
    """
    try:
        job = decode_job(data)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise DamagedRecord from error
    if any(getattr(job, name) != value for name, value in columns.items()):
        raise DamagedRecord
    return job


def log_damaged(job_id: object) -> None:
    """Log that a record was set aside. Without API keys, a whole id is enough to read the result."""
    log.error("job_damaged", job=str(job_id)[:8])


# Transitions. Each returns the job's next version.


def lease(job: Job, token: str, now: float, lease_s: float) -> Job:
    """A queued job, or one whose lease has ended, given to an executor."""
    return replace(
        job,
        version=job.version + 1,
        state="running",
        token=token,
        due_at=now + lease_s,
        started_at=now,
        attempts=job.attempts + 1,
    )


def renew(job: Job, now: float, lease_s: float) -> Job:
    return replace(job, version=job.version + 1, due_at=now + lease_s)


def put_back(job: Job, now: float, delay_s: float) -> Job:
    """A running job returned to the queue by its executor; the attempt does not count."""
    return replace(
        job,
        version=job.version + 1,
        state="queued",
        token="",
        due_at=now + delay_s,
        started_at=None,
        attempts=job.attempts - 1,
    )


def finish(
    job: Job,
    state: Literal["succeeded", "failed", "cancelled"],
    now: float,
    ttl_s: float,
    result: bytes = b"",
    error: bytes = b"",
) -> Job:
    """The job in its final state, without its request."""
    return replace(
        job,
        version=job.version + 1,
        state=state,
        token="",
        request=b"",
        result=result,
        error=error,
        finished_at=now,
        expires_at=now + ttl_s,
        due_at=now + ttl_s,
    )


def expire(job: Job, now: float) -> Job:
    """What remains of an expired job: its id and its owner."""
    return Job(
        id=job.id,
        owner=job.owner,
        state="expired",
        version=job.version + 1,
        created_at=job.created_at,
        expires_at=job.expires_at,
        due_at=now + REMEMBERED_S,
    )
