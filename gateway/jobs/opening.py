"""Opens the job store that `TERCET_JOBS` names."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from gateway.jobs.sqlite import SqliteStore
from gateway.jobs.store import JobStore


def open_store(url: str) -> JobStore:
    """A store for a URL that `shared.settings` has checked, with its library installed (`shared.masters.startup`).

    Nothing is connected yet: a store that cannot be used raises `JobsUnavailable` when it is used.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        return SqliteStore(Path(rest))
    if scheme == "dynamodb":
        from gateway.jobs.dynamodb import DynamoDbStore

        parts = urlsplit(url)
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        return DynamoDbStore(parts.netloc, **options)
    from gateway.jobs.redis_store import RedisStore

    return RedisStore(url)
