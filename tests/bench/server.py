"""The server under test as benchmarks need it: its log, its resources, the CPU time of its pools.

Knows processes, metrics and the log. Does not know which requests the server gets.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil

from deploy.tuning.load.clients import LOOPBACK, Body, Connection, Exchange
from deploy.tuning.load.server import POLL_S, Server
from tests.bench.results import err

LOG_S = 0.1  # a worker logs a branch after it has answered


class MeasuredServer(Server):
    """A server whose processes are observed."""

    @property
    def pid(self) -> int:
        """Process id of `tercet serve`."""
        return self._process.pid

    def in_effect(self) -> dict[str, str]:
        """What the workers chose themselves, for the result document: their dtype, and on a GPU their kernels."""
        slots = self.slots()
        kernels = dict.fromkeys(slot["kernels"] for slot in slots if slot.get("kernels"))
        chosen = {"dtype in effect": slots[0]["dtype"]}
        return {**chosen, "kernels in effect": ", ".join(kernels)} if kernels else chosen

    def log_lines(self) -> list[dict[str, Any]]:
        """The JSON lines that it has logged so far."""
        time.sleep(LOG_S)
        return [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]

    def cpu_s(self) -> Mapping[str, float]:
        """CPU seconds that its processes have used, all their threads and masters included, by pool."""
        seconds: Counter[str] = Counter()
        for pid in self.processes():
            times = psutil.Process(pid).cpu_times()
            seconds[pool_of(pid)] += times.user + times.system
        return seconds

    def wait_until_idle(self) -> None:
        """Wait until the gateway counts no branch in flight, for two seconds at most."""
        deadline = time.monotonic() + 2
        is_busy = re.compile(r"^tercet_slot_in_flight_branches{[^}]*} [1-9]", re.MULTILINE).search
        while time.monotonic() < deadline and ((page := self._client.get("/metrics")).is_error or is_busy(page.text)):
            time.sleep(POLL_S)

    def renew_worker(self, end: Callable[[int], object] = lambda pid: os.kill(pid, signal.SIGTERM)) -> float:
        """End the first slot's worker and wait for its successor. Seconds from the successor's fork to warm.

        The time of the fork is the kernel's (/proc/<pid>/stat, in clock ticks of 10 ms); the state is read from the
        gateway's page of slots every 10 ms.

        Args:
            end: ends the process with this id.
        """
        old: int = self.slots()[0]["pid"]
        end(old)
        return self._age_when_warm(other_than=old)


class ThreadConnections:
    """A connection to the gateway for each thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._thread = threading.local()

    def exchange(self, body: Body, headers: Mapping[str, str] | None = None) -> Exchange:
        """Send a request on the calling thread's own connection."""
        if not hasattr(self._thread, "connection"):
            self._thread.connection = Connection(LOOPBACK, self._port)
        done: Exchange = self._thread.connection.exchange(body, headers)
        return done


@contextmanager
def start_server(models: str, settings: dict[str, str]) -> Iterator[MeasuredServer]:
    """A warm server under test, stopped at the end.

    Raises:
        StartError: it does not get warm.
    """
    with err.status("Starting the server under test …") as status, MeasuredServer(models, settings) as server:
        status.stop()
        if kernels := server.in_effect().get("kernels in effect"):
            err.print(f"Kernels: {kernels}", highlight=False)
        yield server


def pool_of(pid: int) -> str:
    """The pool that a process belongs to, masters included; "serve" for `tercet serve`."""
    return str(psutil.Process(pid).environ().get("TERCET_ROLE", "serve"))
