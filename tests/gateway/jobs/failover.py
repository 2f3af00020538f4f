"""Failovers of Redis for tests: a TCP proxy that leads to another server from now on, and Sentinels."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
from redis import Redis

from tests.e2e.harness import free_port, until
from tests.gateway.jobs.servers import RedisServer, find_redis


class SwitchingProxy(ThreadingTCPServer):
    """Forwards each connection to the server that was the target when it was opened.

    Attributes:
        target: port of the server for new connections.
    """

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target, self.port = target, int(self.server_address[1])
        self.connections: list[_Connection] = []

    def fail_over(self, target: int, answer: bytes = b"") -> None:
        """Lead new connections to another server. With an answer, those that are open get it to each command, as if
        their server had changed."""
        self.target = target
        for connection in self.connections:
            connection.answer = answer

    def reset(self) -> None:
        """Reset all connections."""
        for connection in self.connections:
            with suppress(OSError):
                connection.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()


class _Connection(BaseRequestHandler):
    request: socket.socket
    server: SwitchingProxy
    answer = b""

    def handle(self) -> None:
        self.upstream = socket.create_connection(("127.0.0.1", self.server.target))
        self.server.connections.append(self)
        threading.Thread(target=self._forward_answers, daemon=True).start()
        with suppress(OSError):
            while data := self.request.recv(1 << 16):
                if self.answer:
                    self.request.sendall(self.answer + b"\r\n")
                else:
                    self.upstream.sendall(data)
        self.close()

    def _forward_answers(self) -> None:
        with suppress(OSError):
            while data := self.upstream.recv(1 << 16):
                self.request.sendall(data)
        self.close()

    def close(self) -> None:
        for each in (self.request, self.upstream):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def switching_proxy(target: int) -> Iterator[SwitchingProxy]:
    with SwitchingProxy(target) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
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
    with subprocess.Popen([program, str(config), "--sentinel"], stdout=subprocess.DEVNULL) as process:
        try:
            with Redis(port=port, password="watch" if any("watch" in line for line in settings) else None) as client:
                until(lambda: _knows_replica(client), 30, "the Sentinel knows the replica")
                yield client
        finally:
            process.kill()


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
