"""Jobs in Redis. Each change is one script of `gateway.jobs.redis_scripts`, which Redis runs alone.

A job is a hash with its version and its data; a sorted set per queue holds the ids by `due_at`; a set per owner holds
the open ones. All keys have one hash tag, so that a cluster keeps them together. Redis loses nothing that it has
confirmed if it writes each change to its disk (`appendonly yes`, `appendfsync always`). The clock is that of Redis.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

from gateway.jobs.redis_client import open_redis, redis_errors
from gateway.jobs.redis_scripts import (
    DELETE_JOB,
    FREE_IDEMPOTENCY,
    INSERT_JOB,
    LIST_DUE_JOBS,
    REPLACE_JOB,
    SET_JOB_ASIDE,
)
from gateway.jobs.store import (
    REMEMBERED_S,
    DamagedRecord,
    Job,
    Queue,
    decode_record,
    encode_job,
    log_damaged,
)
from shared.errors import JobsUnavailable
from shared.redis_urls import parse_redis_url

TIMEOUT_S = 5.0
# How long the difference between Redis' clock and this process' monotonic one is used.
CLOCK_S = 1.0
PREFIX = "{tercet}"  # of all keys


class RedisStore:
    """A `JobStore`."""

    max_bytes: int | None = None

    def __init__(self, url: str) -> None:
        """
        Args:
            url: as `shared.redis_urls` takes it.
        """
        import redis

        self._errors = redis_errors()
        self._refusal = redis.ResponseError
        self._epoch = 0.0  # to be added to the monotonic clock
        self._epoch_until = float("-inf")  # monotonic
        self._redis = open_redis(parse_redis_url(url), TIMEOUT_S)
        self._insert, self._replace, self._delete, self._list_due, self._set_job_aside, self._free = (
            self._redis.register_script(script)
            for script in (INSERT_JOB, REPLACE_JOB, DELETE_JOB, LIST_DUE_JOBS, SET_JOB_ASIDE, FREE_IDEMPOTENCY)
        )

    def now(self) -> float:
        now = time.monotonic()
        if now >= self._epoch_until:
            with self._translating():
                seconds, microseconds = self._redis.time()
                now = time.monotonic()
                self._epoch, self._epoch_until = seconds + microseconds / 1e6 - now, now + CLOCK_S
        return now + self._epoch

    def insert(self, job: Job) -> bool:
        with self._translating():
            return bool(self._insert(keys=self._keys(job, job), args=_arguments(job)))

    def read(self, job_id: str) -> Job | None:
        with self._translating():
            try:
                version, data = self._redis.hmget(f"{PREFIX}:job:{job_id}", "version", "data")
            except self._refusal as error:
                if not str(error).startswith("WRONGTYPE"):
                    raise
                version = data = b""
            if data is None and version is None:
                return None
            try:
                return decode_record(data, id=job_id, version=int(version or 0))
            except (DamagedRecord, ValueError):
                self._set_aside(job_id, data or b"")
                return None

    def find_idempotent(self, idempotency: str) -> str | None:
        name = f"{PREFIX}:idempotency:{idempotency}"
        with self._translating():
            found = self._redis.get(name)
            if found is None:
                return None
            job_id = _shown(found)
            if not self._redis.exists(job := f"{PREFIX}:job:{job_id}"):
                self._free(keys=[name, job], args=[found])
                return None
        return job_id

    def replace(self, old: Job, new: Job) -> bool:
        with self._translating():
            arguments = [*_arguments(new), old.version, int(new.queue == "open")]
            return bool(self._replace(keys=self._keys(old, new), args=arguments))

    def delete(self, job: Job) -> bool:
        with self._translating():
            return bool(self._delete(keys=self._keys(job, job), args=[job.version, job.id]))

    def due(self, queue: Queue, until: float, limit: int) -> list[str]:
        with self._translating():
            while True:
                arguments = [until, limit, f"{PREFIX}:job:"]
                present, absent = self._list_due(keys=[f"{PREFIX}:queue:{queue}"], args=arguments)
                for job_id in absent:
                    self._forget_owner(job_id)
                    log_damaged(_shown(job_id))
                if present or len(absent) < limit:
                    return [_shown(job_id) for job_id in present]

    def num_open(self, owner: str | None = None) -> int:
        with self._translating():
            if owner is None:
                return int(self._redis.zcard(f"{PREFIX}:queue:open"))
            return int(self._redis.scard(f"{PREFIX}:owner:{owner}"))

    def close(self) -> None:
        self._redis.close()

    def _set_aside(self, job_id: str, data: bytes) -> None:
        names = [f"job:{job_id}", f"damaged:{job_id}", *(f"queue:{queue}" for queue in get_args(Queue))]
        with self._translating():
            keys = [f"{PREFIX}:{name}" for name in names]
            if self._set_job_aside(keys=keys, args=[job_id, data, int(REMEMBERED_S)]):
                self._forget_owner(job_id.encode())
                log_damaged(job_id)

    def _forget_owner(self, job_id: bytes) -> None:
        """Count the job for no owner: whose it was is in its record."""
        for owner in self._redis.scan_iter(match=f"{PREFIX}:owner:*", count=1000):
            self._redis.srem(owner, job_id)

    def _keys(self, old: Job, new: Job) -> list[str]:
        """The names that a job's scripts use, in their order."""
        return [
            f"{PREFIX}:{name}"
            for name in (
                f"job:{old.id}",
                f"queue:{old.queue}",
                f"queue:{new.queue}",
                f"owner:{old.owner}",
                f"idempotency:{old.idempotency}",
            )
        ]

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            # Idle connections may lead to the same server, which was the primary before a failover.
            self._redis.connection_pool.disconnect(inuse_connections=False)
            raise JobsUnavailable("The job store (Redis) cannot be used.") from error


def _arguments(job: Job) -> list[Any]:
    return [job.version, job.id, repr(job.due_at), encode_job(job), job.idempotency]


def _shown(job_id: bytes) -> str:
    return str(job_id, "ascii", "backslashreplace")
