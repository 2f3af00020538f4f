"""A chaos proxy: forwards connections to a server, and disturbs what the server sends.

It listens on a Unix socket, and runs in a thread of its own until stopped. Each connection has one fault, which a
schedule chooses from the connection's number. It knows bytes, no HTTP.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

Kind = Literal["none", "delay", "drip", "reset", "truncate", "blackhole"]
FAULTS: tuple[Kind, ...] = ("delay", "drip", "reset", "truncate", "blackhole")
CHUNK_BYTES = 65536
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one connection, once the server has sent `after_bytes`.

    delay: each chunk of the response is held for `pause_s`. drip: one byte per `pause_s`. reset: both connections are
    closed with data lost. truncate: the response ends there, the connection is closed in order. blackhole: nothing is
    forwarded any more, in either direction, and the connection stays open.
    """

    kind: Kind = "none"
    after_bytes: int = 0
    pause_s: float = 0.0


Schedule = Callable[[int], Fault]


def always(fault: Fault) -> Schedule:
    return lambda _number: fault


def random_schedule(seed: int, share: float) -> Schedule:
    """Faults of all kinds on `share` (0 to 1) of the connections. The same seed gives the same faults."""

    def choose(number: int) -> Fault:
        rng = random.Random(f"{seed}/{number}")
        if rng.random() >= share:
            return Fault()
        kind = rng.choice(FAULTS)
        after_bytes = rng.choice((0, rng.randrange(1500)))  # of the server's data
        pause_s = {"delay": rng.uniform(0.01, 0.6), "drip": rng.choice((0.05, 1.0))}.get(kind, 0.0)
        return Fault(kind, after_bytes, pause_s)

    return choose


class ChaosProxy:
    """One listener in front of one server. `counts` has the connections so far by fault."""

    def __init__(self, server: Path, listen: Path, schedule: Schedule) -> None:
        """
        Args:
            server: path of the server's Unix socket.
            listen: path of the Unix socket to make.
        """
        self.path = listen
        self.counts: Counter[Kind] = Counter()
        self._server = server
        self._schedule = schedule
        self._clients: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def set_schedule(self, schedule: Schedule) -> None:
        """Set the fault of connections from now on; those that are open keep theirs."""
        self._schedule = schedule

    def drop_connections(self) -> None:
        """Close all open connections; those that follow get faults by the present schedule."""

        def abort_all() -> None:
            for client in self._clients:
                client.transport.abort()

        self._loop.call_soon_threadsafe(abort_all)

    def start(self) -> None:
        self._thread.start()
        self._listener = self._await(asyncio.start_unix_server(self._serve, self.path, backlog=1024))

    def stop(self) -> None:
        """Close the listener and all connections, and end the thread. The socket's file is removed."""
        self._await(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.path.unlink(missing_ok=True)

    def _await(self, coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _close(self) -> None:
        self._listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, requests: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        fault = self._schedule(self.counts.total())
        self.counts[fault.kind] += 1
        self._clients.add(client)
        is_blackhole = asyncio.Event()
        if fault.kind == "blackhole" and fault.after_bytes == 0:
            is_blackhole.set()
        # OSError: one side is gone, and the other sees its connection closed. A task that ends as cancelled makes
        # asyncio of Python 3.11 print a traceback.
        with suppress(OSError, asyncio.CancelledError):
            responses, server = await asyncio.open_unix_connection(self._server)
            forwarding = asyncio.create_task(_forward_requests(requests, server, is_blackhole))
            try:
                await _forward_responses(responses, client, fault, is_blackhole)
            finally:
                forwarding.cancel()
                server.close()
        if fault.kind == "reset":
            client.transport.abort()
        client.close()
        self._clients.discard(client)


async def _forward_requests(
    requests: asyncio.StreamReader, server: asyncio.StreamWriter, is_blackhole: asyncio.Event
) -> None:
    with suppress(OSError):
        while data := await requests.read(CHUNK_BYTES):
            if not is_blackhole.is_set():
                server.write(data)
                await server.drain()
    server.close()  # the client is gone; this also ends the other direction


async def _forward_responses(
    responses: asyncio.StreamReader, client: asyncio.StreamWriter, fault: Fault, is_blackhole: asyncio.Event
) -> None:
    num_sent = 0
    while data := await responses.read(CHUNK_BYTES):
        room = max(0, fault.after_bytes - num_sent)
        calm, rest = (data, b"") if fault.kind == "none" else (data[:room], data[room:])
        client.write(calm)
        await client.drain()
        num_sent += len(calm)
        if fault.kind in {"reset", "truncate"} and num_sent >= fault.after_bytes:
            return
        if fault.kind == "blackhole" and num_sent >= fault.after_bytes:
            is_blackhole.set()
        elif fault.kind == "delay" and rest:
            await asyncio.sleep(fault.pause_s)
            client.write(rest)
        elif fault.kind == "drip":
            for byte in rest:
                client.write(bytes([byte]))
                await client.drain()
                await asyncio.sleep(fault.pause_s)
        num_sent += len(rest)
