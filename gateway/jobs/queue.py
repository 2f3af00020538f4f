"""The queue of jobs: accepts, leases, finishes, cancels and expires them, over any store.

Every operation reads a job, makes its next version and replaces it; if another process was faster, it reads again. The
queue knows neither the runner nor the content of a request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from gateway.jobs import store as transitions
from gateway.jobs.store import Job, JobStore, Queue, encode_job
from shared.errors import (
    BodyTooLarge,
    JobAbandoned,
    JobExpired,
    Overloaded,
    QuotaExceeded,
    TercetError,
    UnknownJob,
    invalid_field,
)

# An executor that has not renewed its lease for this long has lost the job.
LEASE_S = 6.0
# Runners that may die with a job before it fails.
MAX_ATTEMPTS = 8
# Share of the queue that one API key may fill.
OWNER_SHARE = 0.25
# Random bytes of an id: 144 bits.
_ID_BYTES = 18
_ID_CHARS = 24
# What a lease or a purge looks at together.
_BATCH = 16
# How often a lease lists again, if other executors took all that was listed.
_MAX_LISTINGS = 5
# The longest time for which a lease or a purge erases what has expired, before its thread does something else. An
# executor renews each third of a lease (2 s), and one turn of it leases and purges.
ERASING_S = LEASE_S / 24

Final = Literal["succeeded", "failed", "cancelled"]
Count = Callable[[str], None]


class JobQueue:
    """Thread-safe, and safe with other queues of other processes over the same data.

    Attributes:
        num_cleared: jobs that this queue has erased because they had expired, or forgotten.
    """

    def __init__(
        self,
        store: JobStore,
        *,
        ttl_s: float,
        max_open: int,
        count: Count = lambda _event: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            ttl_s: how long a job's result is kept after its end, and a job that does not end after its creation.
            max_open: jobs that may be queued or running.
            count: called with the event of each transition: queued, started, put_back, succeeded, failed, cancelled,
                expired, deleted.
            clock: seconds since the epoch, the same for all processes that share the store; None: the store's.
        """
        self._store = store
        self._ttl_s = ttl_s
        self._max_open = max_open
        self._count = count
        self._clock = clock or store.now
        self.num_cleared = 0

    # For clients.

    def submit(self, owner: str, request: bytes, idempotency_key: str | None = None) -> tuple[Job, bool]:
        """Add a job, unless its owner has sent the same one before.

        Args:
            request: the request in a canonical form, so that equal requests are equal bytes.

        Returns:
            The job, and whether it is new.

        Raises:
            InvalidRequest: the owner has used this key for another request.
            QuotaExceeded, Overloaded: the owner's share of the queue, or the queue, is full.
            BodyTooLarge: the store cannot hold it.
            JobsUnavailable: the store cannot be used, or hangs.
        """
        now = self._clock()
        idempotency, fingerprint = _idempotency(owner, request, idempotency_key)
        job = Job(
            id=secrets.token_urlsafe(_ID_BYTES),
            owner=owner,
            state="queued",
            request=request,
            created_at=now,
            due_at=now,
            expires_at=now + self._ttl_s,
            idempotency=idempotency,
            fingerprint=fingerprint,
        )
        if self._store.max_bytes is not None and len(encode_job(job)) > self._store.max_bytes:
            raise BodyTooLarge(f"The job store takes at most {self._store.max_bytes} bytes; shorten the context.")
        while True:
            if job.idempotency and (known := self._known(job)) is not None:
                return known, False
            self._check_bounds(owner)
            # Where a client library repeated an insert whose confirmation was lost, the job is there.
            if self._store.insert(job) or self._store.read(job.id) is not None:
                self._count("queued")
                return job, True

    def find(self, job_id: str, owner: str) -> Job:
        """
        Raises:
            UnknownJob: there is no such job, or it is another owner's.
            JobExpired, JobsUnavailable
        """
        if len(job_id) != _ID_CHARS:
            raise _unknown()
        job = self._store.read(job_id)
        if job is None or job.owner != owner:
            raise _unknown()
        if job.is_expired(self._clock()):
            self._expire(job)
            raise JobExpired("The job has expired: its request and its result are erased. Send it again.")
        return job

    def cancel_or_delete(self, job_id: str, owner: str) -> Job:
        """Cancel a job that is queued or running; delete one that has ended. The job before that.

        Raises:
            UnknownJob, JobExpired, JobsUnavailable: as `find`.
        """
        if len(job_id) != _ID_CHARS:
            raise _unknown()
        while True:
            job = self.find(job_id, owner)
            if job.queue == "open":
                is_done = self._end(job, "cancelled")
            elif is_done := self._store.delete(job):
                self._count("deleted")
            if is_done:
                return job

    def num_open(self) -> int:
        """Jobs that are queued or running."""
        return self._store.num_open()

    # For executors.

    def lease(self, is_revoked: Callable[[str], bool] | None = None) -> Job | None:
        """Give the job that has been due for longest to the caller, for `LEASE_S`.

        A job whose lease has ended is due again; after `MAX_ATTEMPTS` it fails instead. A job whose owner's key was
        revoked is cancelled. Where many jobs before it have
        expired, it returns None after `ERASING_S`, and `num_cleared` has grown: the next call goes on.
        """
        erases_until = time.monotonic() + ERASING_S
        for _ in range(_MAX_LISTINGS):
            now = self._clock()
            ids = self._store.due("open", now, _BATCH)
            for job_id in ids:
                job = self._store.read(job_id)
                if job is None or job.queue != "open" or not job.is_due(now):
                    continue  # changed since it was listed
                if job.is_expired(now):
                    self._expire(job)
                    if time.monotonic() >= erases_until:
                        return None
                elif is_revoked is not None and is_revoked(job.owner):
                    self._end(job, "cancelled")
                elif job.attempts >= MAX_ATTEMPTS:
                    self._end(job, "failed", error=_ABANDONED.problem())
                elif self._replace(job, leased := transitions.lease(job, secrets.token_hex(16), now, LEASE_S)):
                    self._count("started")
                    return leased
            if len(ids) < _BATCH:
                break
        return None

    def renew(self, job: Job) -> bool:
        """Extend the lease. False: the lease is lost, because the job was cancelled or leased again."""
        return self._update(job, lambda current: transitions.renew(current, self._clock(), LEASE_S))

    def finish(self, job: Job, state: Final, *, result: bytes = b"", error: bytes = b"") -> bool:
        """Store the outcome and erase the request. False: the lease is lost, and nothing is stored."""
        ended = transitions.finish(job, state, self._clock(), self._ttl_s, result, error)
        if self._store.max_bytes is not None and len(encode_job(ended)) > self._store.max_bytes:
            state, result, error = "failed", b"", _TOO_LARGE.problem()
        is_stored = self._update(
            job, lambda current: transitions.finish(current, state, self._clock(), self._ttl_s, result, error)
        )
        if is_stored:
            self._count(state)
        return is_stored

    def put_back(self, job: Job, delay_s: float) -> bool:
        """Return the job to the queue, not to be leased before `delay_s`; this attempt does not count."""
        is_stored = self._update(job, lambda current: transitions.put_back(current, self._clock(), delay_s))
        if is_stored:
            self._count("put_back")
        return is_stored

    def purge(self) -> int:
        """Erase some of what has expired, for `ERASING_S` at most, and forget some of what expired long ago; returns
        how many were erased. Call it again as long as `num_cleared` grows.

        Reading and leasing check expiry too, so nothing is shown between its expiry and the next purge.
        """
        now = self._clock()
        erases_until = time.monotonic() + ERASING_S
        num_erased = 0
        queues: tuple[Queue, ...] = ("final", "open", "expired")
        for job_id in (found for queue in queues for found in self._store.due(queue, now, _BATCH)):
            if (job := self._store.read(job_id)) is None or not job.is_expired(now):
                continue
            if job.state != "expired":
                num_erased += self._expire(job)
            elif job.due_at <= now and self._store.delete(job):
                self.num_cleared += 1
            if time.monotonic() >= erases_until:
                break
        return num_erased

    def close(self) -> None:
        self._store.close()

    def _known(self, job: Job) -> Job | None:
        """The job that was submitted with the same key.

        Raises:
            InvalidRequest: its request was another.
        """
        job_id = self._store.find_idempotent(job.idempotency)
        known = self._store.read(job_id) if job_id is not None else None
        if known is None:
            return None
        if known.is_expired(self._clock()):
            self._expire(known)  # which frees the key
            return None
        if not hmac.compare_digest(known.fingerprint, job.fingerprint):
            raise invalid_field(
                "Idempotency-Key", "was sent before with another request; send a new one with each new request"
            )
        return known

    def _check_bounds(self, owner: str) -> None:
        """Requests that are accepted at the same time, by several gateways or threads, may exceed the bounds by
        their number."""
        max_owned = max(1, int(OWNER_SHARE * self._max_open))
        if owner and self._store.num_open(owner) >= max_owned:
            raise QuotaExceeded(
                f"{max_owned} jobs of this API key are queued or running, its share of the queue (TERCET_JOB_QUEUE). "
                "Wait for one of them to end.",
            )
        if self._store.num_open() >= self._max_open:
            raise Overloaded(
                f"The job queue is full: at most {self._max_open} jobs may be queued or running (TERCET_JOB_QUEUE). "
                "Try again later.",
            )

    def _update(self, leased: Job, change: Callable[[Job], Job]) -> bool:
        """Change a job as long as the lease is the one that `leased` was given."""
        while True:
            current = self._store.read(leased.id)
            if current is None or current.state != "running" or current.token != leased.token:
                return False
            if self._replace(current, change(current)):
                return True

    def _end(self, job: Job, state: Final, error: bytes = b"") -> bool:
        is_done = self._replace(job, transitions.finish(job, state, self._clock(), self._ttl_s, error=error))
        if is_done:
            self._count(state)
        return is_done

    def _expire(self, job: Job) -> bool:
        is_done = job.state != "expired" and self._replace(job, transitions.expire(job, self._clock()))
        if is_done:
            self.num_cleared += 1
            self._count("expired")
        return is_done

    def _replace(self, old: Job, new: Job) -> bool:
        # A client library may repeat a write whose confirmation was lost: then the stored version is ours.
        return self._store.replace(old, new) or self._store.read(new.id) == new


def _unknown() -> UnknownJob:
    return UnknownJob("No job with this id is known here.")


def _idempotency(owner: str, request: bytes, key: str | None) -> tuple[str, str]:
    """A job's `idempotency` and `fingerprint`."""
    if key is None:
        return "", ""
    return (
        hashlib.sha256(msgspec.json.encode([owner, key])).hexdigest(),
        hmac.new(key.encode(), request, hashlib.sha256).hexdigest(),
    )


_ABANDONED = JobAbandoned(f"{MAX_ATTEMPTS} runners ended while they computed this job.")
_TOO_LARGE = TercetError("The job store cannot hold a result of this size; send the request without `explain`.")
