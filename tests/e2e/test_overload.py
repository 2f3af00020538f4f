"""A pool that is full, the answers of the requests that it has no room for, and room that a client leaves."""

from __future__ import annotations

import json
import re
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.chaos.http_client import completion_request
from tests.chaos.measure import Jitter
from tests.e2e.harness import PATIENCE_S, Tercet, metric, until
from tests.e2e.shared_servers import SharedServer

pytestmark = pytest.mark.quick
IN_FLIGHT = 'tercet_slot_in_flight_branches{slot="0"}'
REFUSED = 'tercet_refused_requests_total{reason="overloaded"}'
REQUEST = completion_request(length=20)


def in_flight(tercet: Tercet) -> int:
    """Sequences in the worker's engine, from the worker's metrics."""
    transport = httpx.HTTPTransport(uds=str(tercet.run_dir / "slot-0.sock"))
    with httpx.Client(transport=transport, base_url="http://slot") as worker:
        found = re.search(r'in_flight_branches\{slot="0"\} (\d+)', worker.get("/metrics").text)
    assert found is not None
    return int(found[1])


@contextmanager
def full(tercet: SharedServer) -> Iterator[None]:
    """Meanwhile a request runs and two wait; all have an answer at the end."""

    def complete(length: int) -> int:
        body = {"context": "The old man looked at the sea and", "length": length}
        return httpx.post(f"{tercet.url}/autocomplete", json=body, trust_env=False, timeout=30).status_code

    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(complete, 150)]  # at least three seconds
        until(lambda: metric(tercet, IN_FLIGHT) == 3, PATIENCE_S, "a full slot")
        answers += [pool.submit(complete, 2) for _ in range(2)]
        until(lambda: metric(tercet, "tercet_waiting_branches") == 6, PATIENCE_S, "a full queue")
        with tercet.expecting_errors():
            yield
        assert [answer.result() for answer in answers] == [200] * 3


def test_refusals_come_at_once_on_a_connection_that_stays_open(slow: SharedServer) -> None:
    before = metric(slow, REFUSED)
    with full(slow), socket.create_connection(("127.0.0.1", slow.port)) as sock, Jitter() as jitter:
        times_s = []
        for _ in range(30):
            begin = time.monotonic()
            sock.sendall(REQUEST)
            head, body = sock.recv(1 << 16).split(b"\r\n\r\n", 1)
            times_s.append(time.monotonic() - begin)
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: " in head.lower()
            assert b"\r\nx-request-id: " in head.lower()
            assert b"\r\nConnection: keep-alive\r\n" in head
            assert json.loads(body)["code"] == "overloaded"
        assert sorted(times_s)[15] < 0.05 + jitter.ms(0.5) / 1e3
        # A request that the thread refuses gives the same answer and keeps the connection too.
        sock.sendall(REQUEST.replace(b"Host:", b"X-Request-Id: mine\r\nHost:"))
        head, body = sock.recv(1 << 16).split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nx-request-id: mine" in head.lower()
        assert json.loads(body)["code"] == "overloaded"
        sock.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert metric(slow, REFUSED) == before + 31


def test_a_client_that_hangs_up_frees_its_sequences(slow: SharedServer) -> None:
    with socket.create_connection(("127.0.0.1", slow.port)) as client:
        client.sendall(completion_request(length=256))
        until(lambda: in_flight(slow) == 3, PATIENCE_S, "the request in the engine")
    until(lambda: in_flight(slow) == 0, 5, "its sequences freed")
    assert slow.ask(length=2)["sentences"]


@pytest.mark.integration
def test_health_checks_are_answered_while_all_threads_and_descriptors_are_in_use(tmp_path: Path) -> None:
    """A balancer, or SageMaker, would replace a server that does not answer them. Few descriptors mean few threads.
    The idle connections are more than there are descriptors; they make room."""
    tercet = Tercet(tmp_path, max_batch="48", test_step_delay_ms="0=100")
    tercet.start()
    resource.prlimit(tercet.process.pid, resource.RLIMIT_NOFILE, (128, 128))  # before the pools are started
    try:
        tercet.wait_until_warm()
        num_threads = int(metric(tercet, "tercet_gateway_max_busy_threads"))
        body = {"context": "The old man looked at the sea and", "n": 1, "length": 60, "clean": False}
        client = tercet.make_client()  # one for all: to make it takes longer than a request
        client.headers["Connection"] = "close"

        def refused() -> bool:
            return client.post("/autocomplete", json={"context": 1}).status_code == 503  # with a thread, 422

        with client, ThreadPoolExecutor(num_threads) as pool, ExitStack() as idle:
            for _ in range(300):
                idle.enter_context(socket.create_connection(("127.0.0.1", tercet.port)))
            answers = pool.map(lambda _: client.post("/autocomplete", json=body).status_code, range(num_threads))
            until(refused, 30, "all threads for completions are in use")
            checks = [client.get(path).status_code for path in ("/health/live", "/health/ready", "/ping") * 3]
            assert client.get("/docs").status_code == 200
            assert refused()
            assert checks == [200] * 9
            assert list(answers) == [200] * num_threads
    finally:
        assert tercet.stop() == 0
