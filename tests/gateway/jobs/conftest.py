"""The three stores, each real, and a queue over each."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from gateway.jobs.store import JobStore
from tests.gateway.jobs.servers import AWS_ENVIRON, RedisServer, dynamodb_server, redis_server


class Clock:
    """The time of day, which a test may set forward."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def dynamodb_endpoint() -> Iterator[str]:
    saved = {name: os.environ.get(name) for name in AWS_ENVIRON}
    os.environ.update(AWS_ENVIRON)
    with dynamodb_server() as endpoint:
        yield endpoint
    for name, value in saved.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


OTHER_STORES = [pytest.param(name, marks=pytest.mark.integration) for name in ("redis", "dynamodb")]


@pytest.fixture(params=["sqlite", *OTHER_STORES])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/jobs.sqlite3"
    if request.param == "redis":
        url = str(request.getfixturevalue("redis").url)
        with Redis.from_url(url) as client:
            client.flushall()
        return url
    endpoint = request.getfixturevalue("dynamodb_endpoint")
    return f"dynamodb://jobs-{secrets.token_hex(4)}?region=eu-central-1&endpoint={endpoint}"


@pytest.fixture
def open_again(store_url: str) -> Iterator[Callable[[], JobStore]]:
    """Opens the store of this test, as another process would."""
    with ExitStack() as stack:

        def opened() -> JobStore:
            store = open_store(store_url)
            stack.callback(store.close)
            return store

        yield opened


@pytest.fixture
def clock() -> Clock:
    return Clock()


MakeQueue = Callable[..., JobQueue]


@pytest.fixture
def make_queue(open_again: Callable[[], JobStore], clock: Clock) -> MakeQueue:
    """Makes a queue over the store of this test, by default with room for 100 jobs that are kept for an hour."""

    def make(**options: Any) -> JobQueue:
        return JobQueue(open_again(), **{"ttl_s": 3600.0, "max_open": 100, "clock": clock, **options})

    return make


@pytest.fixture
def queue(make_queue: MakeQueue) -> JobQueue:
    return make_queue()
