"""Servers that tests share: one for each set of settings, started on first use and kept for the whole run.

A test that kills a process, fills a disk or changes files that a server reads starts its own (`harness.running`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.e2e.harness import Tercet, Usage, metric, until, usages
from tests.tls import Certificate

SERVER_ERRORS = 'tercet_requests_total{route="'
# As many concurrent requests as a test sends: afterwards the connections that a server keeps are open.
NUM_WARM_UP_REQUESTS = 24
# Threads, and connections between the pools, are made on demand and kept, so that a test may still add some.
# Tests send hundreds of requests to a server, so that a leak would be larger.
MAX_ADDED = 32

# The certificate, and the settings by name.
Key = tuple[Certificate | None, tuple[tuple[str, str], ...]]


class SharedServer(Tercet):
    """A server that several tests use.

    Attributes:
        num_expected_errors: responses with a status of 500 and above until the server was warm, and those that tests
            provoked (`expecting_errors`).
    """

    num_expected_errors = 0
    usages_at_start: dict[str, Usage]

    @property
    def num_errors(self) -> int:
        """Responses with a status of 500 and above since the start."""
        return int(metric(self, SERVER_ERRORS, 'status="5'))

    @contextmanager
    def expecting_errors(self) -> Iterator[None]:
        """What is answered meanwhile may have a status of 500 and above, such as 503 of an overloaded server."""
        before = self.num_errors
        yield
        self.num_expected_errors += self.num_errors - before

    def warm_up(self) -> None:
        """Open the connections that the server will keep, and note what it holds then."""
        body = {"context": "The old man looked at the sea and", "length": 2, "n_samples": 3}

        def post(_: int) -> int:
            return self.client.post("/autocomplete", json=body, headers=self.key_headers).status_code

        with ThreadPoolExecutor(NUM_WARM_UP_REQUESTS) as pool:
            assert set(pool.map(post, range(2 * NUM_WARM_UP_REQUESTS))) <= {200, 503}
        self.num_expected_errors = self.num_errors
        self.usages_at_start = usages(self)

    def faults(self) -> list[str]:
        """What a server that served all tests well has not: errors that no test provoked, and leaks."""
        if self.process.poll() is not None:
            return ["it has ended"]
        found = []
        if (num_unexpected := self.num_errors - self.num_expected_errors) > 0:
            found.append(f"{num_unexpected} responses with status 5xx that no test provoked")

        def leaks() -> list[str]:
            now = usages(self)
            return [
                f"{name} holds {current} {what}, {before} at the start"
                for name, was in self.usages_at_start.items()
                for what, before, current in (
                    ("descriptors", was.num_descriptors, now[name].num_descriptors),
                    ("threads", was.num_threads, now[name].num_threads),
                )
                if current > before + MAX_ADDED
            ]

        self.client.close()  # its idle connections are descriptors of the server
        self.client = self.make_client()
        try:
            until(lambda: not leaks(), 10, "descriptors and threads as at the start")
        except AssertionError:
            found += leaks()
        return found


class SharedServers:
    """All shared servers of a run."""

    def __init__(self, make_directory: Callable[[], Path]) -> None:
        self._make_directory = make_directory
        self._servers: dict[Key, SharedServer] = {}
        self._faults: list[str] = []

    def get(self, certificate: Certificate | None = None, /, **settings: str) -> SharedServer:
        """The warm server with these settings; a dead one is replaced, and the run fails at its end."""
        key = (certificate, tuple(sorted(settings.items())))
        server = self._servers.get(key)
        if server is not None and server.process.poll() is not None:
            self._end(key)
        if key not in self._servers:
            server = SharedServer(self._make_directory(), certificate, **settings)
            server.start()
            try:
                server.wait_until_announced()
                server.warm_up()
            except BaseException:
                server.stop()
                raise
            self._servers[key] = server
        return self._servers[key]

    def close(self) -> None:
        """Stop all servers.

        Raises:
            AssertionError: A server had faults (`SharedServer.faults`) or did not end well.
        """
        for key in list(self._servers):
            self._end(key)
        assert not self._faults, "\n".join(self._faults)

    def _end(self, key: Key) -> None:
        server = self._servers.pop(key)
        faults = server.faults()
        is_alive = server.process.poll() is None
        family = psutil.Process(server.process.pid).children(recursive=True) if is_alive else []
        if (exit_code := server.stop()) != 0:
            faults.append(f"it ended with {exit_code}")
        if psutil.wait_procs(family, timeout=5)[1] or server.run_dir.exists():
            faults.append("it left processes or its run directory")
        if "SIGSEGV" in server.log():  # a retry hides a crashed worker from the client
            faults.append("a worker crashed")
        settings = dict(key[1])
        if faults:
            sys.stderr.write(f"log of the server with {settings}: {server.log_path}\n")
            self._faults.append(f"server with {settings}: {'; '.join(faults)}")
