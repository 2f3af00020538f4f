"""Jobs in Redis. Each change is one script of `gateway.shared_store.scripts`, which Redis runs alone.

A job is a hash with its version and its data; a sorted set per queue holds the ids by `due_at`; a set per owner holds
the open ones. All keys have one hash tag, so that a cluster keeps them together. Redis loses nothing that it has
confirmed if it writes each change to its disk (`appendonly yes`, `appendfsync always`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.jobs.store import MAX_CALLS, Job, Queue, decode_job, encode_job
from gateway.shared_store.client import open_redis
from gateway.shared_store.scripts import DELETE_JOB, INSERT_JOB, REPLACE_JOB
from shared.errors import JobsUnavailable
from shared.redis_urls import parse_redis_url

TIMEOUT_S = 5.0
PREFIX = "{tercet}"  # of all keys


class RedisStore:
    """A `JobStore`."""

    max_bytes: int | None = None
    max_calls = MAX_CALLS

    def __init__(self, url: str) -> None:
        """
        Args:
            url: as `shared.redis_urls` takes it.
        """
        import redis

        self._error = redis.RedisError
        self._redis = open_redis(parse_redis_url(url), TIMEOUT_S)
        self._insert, self._replace, self._delete = (
            self._redis.register_script(script) for script in (INSERT_JOB, REPLACE_JOB, DELETE_JOB)
        )

    def insert(self, job: Job) -> bool:
        with self._translating():
            return bool(self._insert(keys=self._keys(job, job), args=_arguments(job)))

    def read(self, job_id: str) -> Job | None:
        with self._translating():
            data = self._redis.hget(f"{PREFIX}:job:{job_id}", "data")
        return None if data is None else decode_job(data)

    def find_idempotent(self, idempotency: str) -> str | None:
        with self._translating():
            job_id = self._redis.get(f"{PREFIX}:idempotency:{idempotency}")
        return None if job_id is None else str(job_id, "ascii")

    def replace(self, old: Job, new: Job) -> bool:
        with self._translating():
            arguments = [*_arguments(new), old.version, int(new.queue == "open")]
            return bool(self._replace(keys=self._keys(old, new), args=arguments))

    def delete(self, job: Job) -> bool:
        with self._translating():
            return bool(self._delete(keys=self._keys(job, job), args=[job.version, job.id]))

    def due(self, queue: Queue, until: float, limit: int) -> list[str]:
        with self._translating():
            found = self._redis.zrange(f"{PREFIX}:queue:{queue}", "-inf", until, byscore=True, offset=0, num=limit)
        return [str(job_id, "ascii") for job_id in found]

    def num_open(self, owner: str | None = None) -> int:
        with self._translating():
            if owner is None:
                return int(self._redis.zcard(f"{PREFIX}:queue:open"))
            return int(self._redis.scard(f"{PREFIX}:owner:{owner}"))

    def close(self) -> None:
        self._redis.close()

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
        except self._error as error:
            # Idle connections may lead to the same server, which was the primary before a failover.
            self._redis.connection_pool.disconnect(inuse_connections=False)
            raise JobsUnavailable("The job store (Redis) cannot be used.") from error


def _arguments(job: Job) -> list[Any]:
    return [job.version, job.id, repr(job.due_at), encode_job(job), job.idempotency]
