"""R18: an idle server stops, and the next connection starts it again; requests around the stop are all answered.

A thread of the test stands in for systemd's PID 1: it keeps the listening socket, and starts `tercet serve` with it
(`sd_listen_fds(3)`) when a connection waits and no server runs.
"""

from __future__ import annotations

import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from tests.chaos.http_client import Answer, completion_request, exchange, find_fault, request_bytes
from tests.e2e.harness import Background, Tercet, until
from tests.e2e.lifecycle import start_behind, wait_for_start

NUM_REQUESTS, SPACING_S = 25, 0.1


class SocketHolder(Background):
    """What a socket unit does: the server is started by a connection, and again by the next after it has ended."""

    def __init__(self, tercet: Tercet, listener: socket.socket) -> None:
        super().__init__()
        self.exit_codes: list[int] = []
        self._tercet = tercet
        self._listener = listener

    def run(self) -> None:
        while not self.is_over.is_set():
            if select.select([self._listener], [], [], 0.02)[0]:
                start_behind(self._tercet, self._listener)
                self.exit_codes.append(self._wait())

    def _wait(self) -> int:
        process = self._tercet.process
        while process.poll() is None:
            if self.is_over.wait(0.02):
                process.terminate()
                break
        return process.wait(timeout=40)


def send_around_a_stop(tercet: Tercet, num_stops: int) -> list[Answer]:
    """Requests at equal intervals, each on a new connection, from when a stop begins until long after the exit."""
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        sent = []
        until(lambda: len(tercet.events("idle_stop_began")) >= num_stops, 30, "the idle stop began")
        for number in range(NUM_REQUESTS):
            sent.append(
                threads.submit(exchange, tercet.port, completion_request(f"Door {number} opened, and", length=4))
            )
            time.sleep(SPACING_S)
        return [future.result() for future in sent]


@pytest.mark.parametrize("num_stops", [1, pytest.param(10, marks=pytest.mark.deploy)])
def test_requests_around_an_idle_stop_are_all_answered(tmp_path: Path, num_stops: int) -> None:
    tercet = Tercet(tmp_path, idle_stop_s="1.5", drain_s="0.5")
    with (
        socket.create_server(("127.0.0.1", tercet.port), backlog=128) as listener,
        SocketHolder(tercet, listener) as holder,
    ):
        first = exchange(tercet.port, completion_request(length=4))
        assert find_fault(first) == ""
        for stop in range(1, num_stops + 1):
            answers = send_around_a_stop(tercet, stop)
            assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers]
            wait_for_start(tercet, stop + 1)
        assert holder.exit_codes == [0] * num_stops
    tercet.client.close()


def test_completions_keep_a_server_running_and_probes_do_not(tmp_path: Path) -> None:
    tercet = Tercet(tmp_path, idle_stop_s="1.5")
    tercet.start()
    tercet.wait_until_announced()
    ends_at = time.monotonic() + 3
    while time.monotonic() < ends_at:
        assert exchange(tercet.port, completion_request(length=1)).status == 200
        time.sleep(0.3)
    assert tercet.events("idle_stop_began") == []
    while tercet.process.poll() is None and time.monotonic() < ends_at + 20:
        for path in ("/health/ready", "/metrics", "/slots", "/nowhere"):
            exchange(tercet.port, request_bytes("GET", path))
        time.sleep(0.2)
    assert tercet.process.wait(timeout=1) == 0
    assert len(tercet.events("idle_stop_began")) == 1
    tercet.client.close()


@pytest.mark.deploy
def test_an_open_job_keeps_a_server_running(tmp_path: Path) -> None:
    """Also one that another gateway runs: this one would have to run it if that gateway ended."""
    tercet = Tercet(tmp_path, idle_stop_s="1.5")
    queue = JobQueue(open_store(tercet.environ["TERCET_JOBS"]), ttl_s=60.0, max_open=10)
    queue.submit("", b'{"context": "The door opened, and"}')
    job = queue.lease()
    assert job is not None
    tercet.start()
    tercet.wait_until_warm()
    ends_at = time.monotonic() + 6
    while time.monotonic() < ends_at:
        assert queue.renew(job)
        time.sleep(0.2)
    assert tercet.events("idle_stop_began") == []
    assert tercet.process.poll() is None
    assert queue.finish(job, "succeeded", result=b"{}")
    assert tercet.process.wait(timeout=30) == 0
    tercet.client.close()
    queue.close()
