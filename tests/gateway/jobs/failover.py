"""Failovers of Redis for tests: a TCP proxy that leads to another server from now on, and Sentinels."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.e2e.harness import free_port, until
from tests.gateway.jobs.servers import RedisServer, find_redis


@dataclass
class SwitchingProxy:
    """Forwards each connection to the server that was the target when it was opened.

    Attributes:
        target: port of the server for new connections.
        answer: what each connection that is open when it is set gets in answer to every command, as if its server had
            changed.
    """

    target: int
    port: int = 0
    _connections: list[_Connection] = field(default_factory=list)

    def fail_over(self, target: int, answer: bytes = b"") -> None:
        """Lead new connections to another server. With an answer, those that are open get it to each command."""
        self.target = target
        for connection in self._connections:
            connection.answer = answer

    def reset(self) -> None:
        """Reset all connections."""
        for connection in self._connections:
            connection.reset()

    def accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self.target))
                connection = _Connection(client, server)
                self._connections.append(connection)
                threading.Thread(target=connection.forward_commands, daemon=True).start()
                threading.Thread(target=connection.forward_answers, daemon=True).start()


@dataclass
class _Connection:
    client: socket.socket
    server: socket.socket
    answer: bytes = b""

    def forward_commands(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(1 << 16):
                if self.answer:
                    self.client.sendall(self.answer + b"\r\n")
                else:
                    self.server.sendall(data)
        self.close()

    def forward_answers(self) -> None:
        with suppress(OSError):
            while data := self.server.recv(1 << 16):
                self.client.sendall(data)
        self.close()

    def reset(self) -> None:
        with suppress(OSError):
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()

    def close(self) -> None:
        for each in (self.client, self.server):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def switching_proxy(target: int) -> Iterator[SwitchingProxy]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = SwitchingProxy(target, listener.getsockname()[1])
        threading.Thread(target=proxy.accept, args=(listener,), daemon=True).start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            proxy.reset()


@contextmanager
def sentinel(
    directory: Path, primary: RedisServer, replica: RedisServer, *settings: str, tls: bool = False
) -> Iterator[Redis]:
    """A Sentinel that watches two servers as `mymaster`; yields a client of it, whose port is the URL's.

    Args:
        settings: further lines of its configuration.
        tls: whether the addresses of the servers are those for TLS.
    """
    program = find_redis()
    if program is None:
        pytest.skip("redis-server is not installed")
    port = free_port()
    primary_port = primary.options["tls-port"] if tls else primary.port
    config = directory / "sentinel.conf"
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {directory}",
        f"sentinel monitor mymaster 127.0.0.1 {primary_port} 1",
        "sentinel down-after-milliseconds mymaster 1000",
        "sentinel failover-timeout mymaster 2000",
        *settings,
    ]
    config.write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([program, str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        with Redis(port=port, password="watch" if any("watch" in line for line in settings) else None) as client:
            until(lambda: _knows_replica(client), 30, "the Sentinel knows the replica")
            yield client
    finally:
        process.kill()
        process.wait()


def _knows_replica(client: Redis) -> bool:
    with suppress(Exception):
        replicas = client.sentinel_slaves("mymaster")
        return any(not one["is_disconnected"] and one["master-link-status"] == "ok" for one in replicas)
    return False


def fail_over(client: Redis) -> int:
    """Have the Sentinel make the replica the primary; returns the new primary's port."""
    before = _primary_port(client)
    client.sentinel_failover("mymaster")
    until(lambda: _primary_port(client) != before, 30, "another primary")
    return _primary_port(client)


def _primary_port(client: Redis) -> int:
    address: Any = client.sentinel_get_master_addr_by_name("mymaster")
    return int(address[1])
