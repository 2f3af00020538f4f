"""Engines that fail in real workers: replaced in time, while the other slot serves. And workers that may write little.

The instance runs as a user other than root, to whom the code, the home directory and the kernels in `__pycache__` are
read-only: what it writes is in its run and cache directories.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.measure import Jitter
from tests.e2e.harness import PATIENCE_S, TERCET, Tercet, serving, until
from tests.programs import as_user

UNPRIVILEGED = 65534
DEVICE, HANG = 901, 902


def as_unprivileged(base: Path) -> Tercet:
    """An instance that has not started, of a user other than root; of this one, if it is not root."""
    cache = base / "cache"
    faults = f"{DEVICE}=device,{HANG}=hang"
    instance = Tercet(base, models="embedded*2", hang_s="1", test_faults=faults, cache_dir=str(cache))
    cache.mkdir()
    instance.run_dir.mkdir(mode=0o700)
    instance.environ["HOME"] = "/nonexistent"
    if os.geteuid() == 0:
        for path in (instance.run_dir, cache, *cache.rglob("*")):
            os.chown(path, UNPRIVILEGED, UNPRIVILEGED)
        instance.command = (*as_user(UNPRIVILEGED), *TERCET, "serve")
    return instance


@pytest.fixture(scope="module")
def tercet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    with serving(as_unprivileged(tmp_path_factory.mktemp("t"))) as tercet:
        yield tercet


def slot_socket(tercet: Tercet, index: int) -> httpx.Client:
    """A client of one slot's worker; by the gateway, a request that fails is retried on the other."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(tercet.run_dir / f"slot-{index}.sock")), timeout=10)


def pid_of(tercet: Tercet, index: int) -> int:
    return int(tercet.slots()[index]["pid"])


def failures(tercet: Tercet, index: int, kind: str) -> bool:
    return f'tercet_slot_failures_total{{kind="{kind}",slot="{index}"}}' in tercet.client.get("/metrics").text


def test_a_user_that_may_not_write_to_code_and_home_is_served(tercet: Tercet) -> None:
    assert len(tercet.ask()["sentences"]) == 3
    if os.geteuid() == 0:
        family = [process for processes in tercet.processes().values() for process in processes]
        assert {process.uids().real for process in family} == {UNPRIVILEGED}
    assert "cannot be cached" not in tercet.log()


def test_fifty_clients_that_hang_up_leave_no_sequence_descriptor_or_thread(tercet: Tercet) -> None:
    worker = psutil.Process(pid_of(tercet, 0))
    body = json.dumps({"prompt": "The sea", "sampling": {"max_new_tokens": 900}}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: slot\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    def hang_up(slot: httpx.Client) -> float:
        """Until the sequence is gone, in seconds."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tercet.run_dir / "slot-0.sock"))
            client.sendall(head + body)
            while b"accepted" not in client.recv(4096):
                pass
        began = time.monotonic()
        until(lambda: 'in_flight_branches{slot="0"} 0.0' in slot.get("http://slot/metrics").text, 5, "no sequence left")
        return time.monotonic() - began

    with slot_socket(tercet, 0) as slot:
        for _ in range(10):  # the pool's threads start as they are needed
            hang_up(slot)
        before = worker.num_fds(), worker.num_threads()
        with Jitter() as jitter:
            took = [hang_up(slot) for _ in range(50)]
        until(lambda: worker.num_fds() <= before[0], PATIENCE_S, "no descriptor left")
        assert worker.num_threads() <= before[1] + 2
    assert sorted(took)[48] < 0.2 + jitter.ms(1.0) / 1e3


def statuses(tercet: Tercet, number: int) -> list[int]:
    """Those of requests that are sent together, and have to agree with their headers."""

    def ask(_: int) -> int:
        response = httpx.post(
            f"{tercet.url}/autocomplete", json={"context": "The sea", "length": 3}, timeout=60, trust_env=False
        )
        assert response.status_code in {200, 503}, response.text
        assert (response.status_code == 503) is ("retry-after" in response.headers)
        return response.status_code

    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(ask, range(number)))


@contextmanager
def limited(pid: int, resource: str, number: int) -> Iterator[None]:
    """Meanwhile a process of the instance may have no more of a resource than this. Its user may set that, root need
    not."""
    prlimit = [*(as_user(UNPRIVILEGED) if os.geteuid() == 0 else ()), "prlimit", f"--pid={pid}"]
    show = [*prlimit, f"--{resource}", "--output=SOFT", "--noheadings"]
    before = subprocess.run(show, check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run([*prlimit, f"--{resource}={number}:"], check=True)
    try:
        yield
    finally:
        subprocess.run([*prlimit, f"--{resource}={before}:"], check=True)


def has_no_threads(tercet: Tercet, role: str) -> bool:
    return role in {event["role"] for event in tercet.events("thread_not_started")}


def test_a_gateway_that_can_start_no_thread_refuses_requests_and_ends_nothing(tercet: Tercet) -> None:
    """The limit counts all processes of the user, so one is as good as none."""
    processes = tercet.processes()
    with limited(processes["gateway"][1].pid, "nproc", 1):
        until(lambda: 503 in statuses(tercet, 24), 30, "a refused request")
    assert has_no_threads(tercet, "gateway")
    assert statuses(tercet, 12) == [200] * 12
    assert tercet.processes() == processes


def test_a_worker_without_descriptors_accepts_again_when_it_has_some(tercet: Tercet) -> None:
    worker = psutil.Process(pid_of(tercet, 0))
    with slot_socket(tercet, 0) as slot, ThreadPoolExecutor(1) as threads:
        with limited(worker.pid, "nofile", 3):
            answer = threads.submit(slot.get, "http://slot/state?once")
            until(lambda: tercet.events("connection_not_accepted"), 10, "a connection that waits")
            assert statuses(tercet, 4) == [200] * 4
        assert answer.result().status_code == 200
    assert pid_of(tercet, 0) == worker.pid


def test_after_a_device_error_the_process_is_gone_in_500_ms_and_replaced(tercet: Tercet) -> None:
    index = 1
    worker = psutil.Process(pid_of(tercet, index))
    request = {"prompt": "The sea", "seed": DEVICE}
    with slot_socket(tercet, index) as slot, Jitter() as jitter:
        began = time.monotonic()
        lines = [json.loads(line) for line in slot.post("http://slot/generate", json=request).text.splitlines()]
        until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 2, "the worker gone")
        assert time.monotonic() - began < 0.5 + jitter.ms(1.0) / 1e3
    assert lines[-1]["event"] == "failed"
    assert lines[-1]["code"] == "device_error"
    assert "illegal" not in lines[-1]["detail"]
    for _ in range(3):  # by the other slot, meanwhile
        assert len(tercet.ask()["sentences"]) == 3
    tercet.wait_until_warm()
    assert pid_of(tercet, index) != worker.pid
    assert failures(tercet, index, "device_error")


def test_a_looping_engine_costs_its_caller_no_more_than_its_deadline_and_is_replaced(tercet: Tercet) -> None:
    before = [pid_of(tercet, index) for index in (0, 1)]
    began = time.monotonic()
    fields: dict[str, Any] = {"context": "The sea", "seed": HANG, "n": 1, "max_time": 0.6}
    with Jitter() as jitter:
        response = tercet.client.post("/autocomplete", json=fields)
        answered_s = time.monotonic() - began
    assert answered_s < 0.6 + 0.1 + jitter.ms(1.0) / 1e3
    assert response.status_code == 504

    def is_replaced() -> bool:
        slots = tercet.slots()
        pids = [slot["pid"] for slot in slots]
        return len({*pids, *before}) == 3 and all(slot["state"] == "warm" for slot in slots)

    until(is_replaced, 30, "the hanging worker replaced")
    hung = next(index for index in (0, 1) if pid_of(tercet, index) != before[index])
    assert failures(tercet, hung, "hang")
    assert len(tercet.ask()["sentences"]) == 3
