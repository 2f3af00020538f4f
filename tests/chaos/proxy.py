"""A chaos proxy: forwards connections to a server, and disturbs what the server sends.

It listens on a Unix socket or on a TCP port of the loopback interface, and runs in a thread of its own until stopped.
Each connection has one fault, which a schedule chooses from the connection's number. It knows bytes, no HTTP.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.chaos.http_client import LOOPBACK, Endpoint

Kind = Literal["none", "delay", "drip", "reset", "truncate", "blackhole"]
FAULTS: tuple[Kind, ...] = ("delay", "drip", "reset", "truncate", "blackhole")
CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one connection, once the server has sent `after_bytes`.

    delay: each chunk of the response is held for `pause_s`. drip: one byte per `pause_s`. reset: both connections are
    closed with data lost (RST on TCP). truncate: the response ends there, the connection is closed in order. blackhole:
    nothing is forwarded any more, in either direction, and the connection stays open.
    """

    kind: Kind = "none"
    after_bytes: int = 0
    pause_s: float = 0.0


Schedule = Callable[[int], Fault]


def always(fault: Fault) -> Schedule:
    return lambda _number: fault


def random_schedule(seed: int, share: float, *, max_bytes: int = 1500) -> Schedule:
    """Faults of all kinds on `share` (0 to 1) of the connections. The same seed gives the same faults.

    Args:
        max_bytes: a fault begins within this many bytes of the server's data, in half of the cases at once.
    """

    def choose(number: int) -> Fault:
        rng = random.Random(f"{seed}/{number}")
        if rng.random() >= share:
            return Fault()
        kind = rng.choice(FAULTS)
        after_bytes = rng.choice((0, rng.randrange(max_bytes)))
        pause_s = {"delay": rng.uniform(0.01, 0.6), "drip": rng.choice((0.05, 1.0))}.get(kind, 0.0)
        return Fault(kind, after_bytes, pause_s)

    return choose


class ChaosProxy:
    """One listener in front of one server. `counts` has the connections so far by fault."""

    def __init__(
        self, server: Endpoint, listen: Path | None, schedule: Schedule, address: tuple[str, int] = (LOOPBACK, 0)
    ) -> None:
        """
        Args:
            listen: path of the Unix socket to make; None: TCP.
            address: TCP address to listen at; port 0 takes a free one, see `port`.
        """
        self.path = listen
        self.counts: Counter[Kind] = Counter()
        self._server = server
        self._schedule = schedule
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[socket.socket] = set()
        self._num_accepted = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        if listen is None:
            self._listener = socket.socket()
            self._listener.bind(address)
        else:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(listen))
        self._listener.listen(1024)
        self._listener.setblocking(False)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def set_schedule(self, schedule: Schedule) -> None:
        """Set the fault of connections from now on; those that are open keep theirs."""
        self._schedule = schedule

    def drop_connections(self) -> None:
        """Close all open connections; those that follow get faults by the present schedule."""

        def shut_down() -> None:
            for client in self._clients:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

        self._loop.call_soon_threadsafe(shut_down)

    def start(self) -> None:
        self._thread.start()
        self._loop.call_soon_threadsafe(self._loop.add_reader, self._listener, self._accept)

    def stop(self) -> None:
        """Close the listener and all connections, and end the thread. The socket's file is removed. May be repeated."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for connection in (self._listener, *self._clients):  # a task that was cancelled before it ran left its client
            connection.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel_all(self) -> None:
        self._loop.remove_reader(self._listener)
        own = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> None:
        # Not `sock_accept`: cancelled at the wrong moment, it loses the connection that it has accepted.
        with suppress(BlockingIOError):
            client, _ = self._listener.accept()
            client.setblocking(False)
            fault = self._schedule(self._num_accepted)
            self._num_accepted += 1
            self.counts[fault.kind] += 1
            self._clients.add(client)
            self._spawn(self._serve(client, fault))

    async def _serve(self, client: socket.socket, fault: Fault) -> None:
        server = socket.socket(socket.AF_UNIX if self._server.path else socket.AF_INET)
        server.setblocking(False)
        address = str(self._server.path) if self._server.path else (LOOPBACK, self._server.port)
        is_blackhole = asyncio.Event()
        try:
            await self._loop.sock_connect(server, address)
            if fault.kind == "blackhole" and fault.after_bytes == 0:
                is_blackhole.set()
            requests = self._loop.create_task(self._forward_requests(client, server, is_blackhole))
            try:
                await self._forward_responses(server, client, fault, is_blackhole)
            finally:
                requests.cancel()
                await asyncio.gather(requests, return_exceptions=True)
        except OSError:
            pass  # one side is gone: the other sees its connection closed
        finally:
            if fault.kind == "reset":
                _make_closing_reset(client)
                _make_closing_reset(server)
            client.close()
            self._clients.discard(client)
            server.close()

    async def _forward_requests(
        self, client: socket.socket, server: socket.socket, is_blackhole: asyncio.Event
    ) -> None:
        with suppress(OSError):
            while data := await self._loop.sock_recv(client, CHUNK_BYTES):
                if not is_blackhole.is_set():
                    await self._loop.sock_sendall(server, data)
            server.shutdown(socket.SHUT_RDWR)  # the client is gone; this also ends the other direction

    async def _forward_responses(
        self, server: socket.socket, client: socket.socket, fault: Fault, is_blackhole: asyncio.Event
    ) -> None:
        num_sent = 0
        while data := await self._loop.sock_recv(server, CHUNK_BYTES):
            room = max(0, fault.after_bytes - num_sent)
            calm, rest = (data, b"") if fault.kind == "none" else (data[:room], data[room:])
            await self._loop.sock_sendall(client, calm)
            num_sent += len(calm)
            if fault.kind in {"reset", "truncate"} and num_sent >= fault.after_bytes:
                return
            if fault.kind == "blackhole" and num_sent >= fault.after_bytes:
                is_blackhole.set()
            elif fault.kind == "delay" and rest:
                await asyncio.sleep(fault.pause_s)
                await self._loop.sock_sendall(client, rest)
            elif fault.kind == "drip":
                for byte in rest:
                    await self._loop.sock_sendall(client, bytes([byte]))
                    await asyncio.sleep(fault.pause_s)
            num_sent += len(rest)


def _make_closing_reset(connection: socket.socket) -> None:
    """`SO_LINGER` with a time of 0: closing discards data and sends RST (`man 7 socket`). Unix sockets have no RST;
    there the peer gets ECONNRESET if data it sent was not read."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
