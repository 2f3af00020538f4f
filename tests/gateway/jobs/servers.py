"""Real servers of job stores for tests: redis-server, and DynamoDB as moto's server, each in a process of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest

from tests.e2e.harness import free_port, until

# moto accepts any credentials; boto3 wants some.
AWS_ENVIRON = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_EC2_METADATA_DISABLED": "true"}


def find_redis() -> str | None:
    """The path of redis-server, if it is installed."""
    return shutil.which("redis-server")


class RedisServer:
    """redis-server that writes every change to its disk. It can be killed and started again with its data."""

    def __init__(self, directory: Path, **options: str) -> None:
        """
        Args:
            options: options of redis.conf, with `_` for `-`.
        """
        self.directory = directory
        self.options = {name.replace("_", "-"): value for name, value in options.items()}
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program = find_redis()
        if program is None:
            pytest.skip("redis-server is not installed")
        options = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.directory,
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            **self.options,
        }
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self.process = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
        # Gateways wait 100 ms for it. On a busy machine of two cores, it would wait that long for one of them.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, -10)
        until(lambda: _accepts(self.port), 20, "redis-server listens")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def volatile_redis(directory: Path) -> AbstractContextManager[RedisServer]:
    """A server that keeps its data in memory only, so that no command waits for the disk."""
    return redis_server(directory, appendonly="no", appendfsync="no")


@contextmanager
def redis_server(directory: Path, **options: str) -> Iterator[RedisServer]:
    server = RedisServer(directory, **options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def dynamodb_table(url: str) -> Iterator[tuple[Any, str]]:
    """boto3's client and the table of a store's URL."""
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    client: Any = boto3.client("dynamodb", region_name=options["region"][0], endpoint_url=options["endpoint"][0])
    yield client, parts.netloc
    client.close()


def start_child(url: str, what: str) -> subprocess.Popen[str]:
    """A process that uses a job store as `child.py` says."""
    command = [sys.executable, str(Path(__file__).with_name("child.py")), url, what]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@contextmanager
def dynamodb_server() -> Iterator[str]:
    """
    Yields:
        Its endpoint.
    """
    port = free_port()
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("moto_server.py")), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _accepts(port), 60, "moto's server listens")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _accepts(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False
