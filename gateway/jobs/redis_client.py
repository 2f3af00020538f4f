"""Opens a client of Redis: of one server, or of the primary that Sentinels name.

After a failover a connection may still lead to the old primary, which is a replica now, loads its data, or has lost its
own primary. Such an answer closes the connection, and the command, which was not executed, is sent once more by a new
one.
"""

from __future__ import annotations

from typing import Any

from shared.redis_urls import RedisUrl


def redis_errors() -> tuple[type[Exception], ...]:
    """What a command raises: redis-py's own errors, and others where the answer is none that Redis gives."""
    import redis

    return (redis.RedisError, ValueError, TypeError, AttributeError, LookupError, RecursionError)


def open_redis(url: RedisUrl, timeout_s: float) -> Any:
    """A `redis.Redis`. Connects to nothing yet.

    Args:
        timeout_s: of a connection and of a command.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import parse_url
    from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError
    from redis.retry import Retry
    from redis.sentinel import Sentinel, SentinelConnectionPool

    timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    # redis-py's client for Sentinels raises a ConnectionError where another raises a ReadOnlyError.
    not_executed = (ReadOnlyError, MasterDownError, BusyLoadingError)
    retry = Retry(NoBackoff(), 1, not_executed)
    if not url.service:
        return redis.Redis(connection_pool=redis.ConnectionPool.from_url(url.url, retry=retry, **timeouts))
    of_primary = {**parse_url(url.url), **timeouts}  # type: ignore[no-untyped-call]
    for name in ("host", "port"):
        of_primary.pop(name, None)
    of_primary["ssl"] = of_primary.pop("connection_class", None) is not None
    of_sentinels = {
        **{name: value for name, value in of_primary.items() if name.startswith(("ssl", "socket_"))},
        **dict(url.sentinel_login),
        "retry": Retry(NoBackoff(), 0),
    }
    sentinel = Sentinel(url.addresses, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    pool: Any = SentinelConnectionPool(url.service, sentinel, retry=retry, **of_primary)  # type: ignore[no-untyped-call]
    return redis.Redis(connection_pool=pool)
