"""The watcher against real state streams: a worker starts, ends, is silent, and is replaced or is not."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from gateway.pool.admission import Admission
from gateway.pool.client import BranchError
from gateway.pool.slot_table import MAX_DOWN_S
from gateway.pool.watcher import FailureTotals, PoolWatcher
from shared.errors import NotReady
from shared.plan import Plan, Slot
from shared.protocol import PROTOCOL, Accepted, GenerateRequest, SlotState, State
from shared.time_margins import MARGINS
from tests.e2e.harness import until
from tests.gateway.pool.helpers import END, HEAD, Answer, chunk, line, serving
from tests.gateway.pool.reservations import claim

SILENCE_S = 0.5  # shorter than the product's


def make_pool(folder: Path, max_down_s: float = MAX_DOWN_S) -> tuple[Plan, Admission]:
    """A pool of one slot."""
    plan = Plan({}, [], [Slot(0, "cpu", "small", str(folder / "slot.sock"), 3)])
    return plan, Admission(plan, "auto", 6, max_down_s)


def worker(pid: int, farewell: bytes) -> tuple[Answer, threading.Event]:
    """A worker that loads, is warm until the event is set, sends its farewell and closes the connection."""
    stop = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(State(state="loading", pid=pid)))
        connection.sendall(line(State(state="warm", pid=pid, ms_per_token=2.0)))
        stop.wait(10)
        connection.sendall(farewell)

    return answer, stop


@pytest.mark.parametrize(
    ("farewell", "reason"),
    [
        (line(State(state="draining")) + END, "its worker closed the state stream"),
        (b"", "The peer closed the connection before the response was complete."),
    ],
    ids=["stops", "dies"],
)
def test_admission_follows_the_worker_to_its_end_and_its_successor(
    short_path: Path, farewell: bytes, reason: str
) -> None:
    plan, admission = make_pool(short_path)
    with structlog.testing.capture_logs() as events:
        own = claim()
        PoolWatcher(plan, admission, ack_s=0.2)  # before its worker exists
        assert admission.states()[0].state == "down"
        for pid in (1, 2):
            answer, stop = worker(pid, farewell)
            with serving(short_path, answer):
                until(lambda: admission.states()[0].state == "warm", 5, "a warm slot")
                assert admission.states()[0].pid == pid
                for slot in admission.reserve(own, 3):
                    admission.release(slot, own)
                stop.set()
            until(lambda: admission.states()[0].state == "down", 5, "a lost slot")
    changes = [event["state"] for event in events if event["event"] == "slot_state_changed"]
    assert changes[:2] == ["loading", "warm"]
    assert next(event["reason"] for event in events if event["event"] == "slot_lost") == reason


def slot_worker(farewell: bytes, lose: threading.Event, release: threading.Event) -> Answer:
    """A worker with one branch that never ends. On `lose` it sends its farewell on the state stream."""

    def answer(connection: socket.socket) -> None:
        # The server has read the request; only the state stream's connection is the first.
        if next(connections) == 0:
            connection.sendall(HEAD + line(State(state="warm", ms_per_token=2.0)))
            lose.wait(10)
            connection.sendall(farewell)
            if not farewell:
                release.wait(10)  # silent, like a stopped process
        else:
            connection.sendall(HEAD + line(Accepted()))
            release.wait(10)

    connections = itertools.count()
    return answer


@pytest.mark.parametrize(
    ("farewell", "is_ended"),
    [
        (b"", True),
        (chunk(b"<html>\n"), True),
        (END, True),
        (line(State(state="draining")) + END, False),
        (line(State(state="draining")), False),
    ],
    ids=["is silent", "sends garbage", "ends without draining", "drains", "drains and breaks off"],
)
def test_branches_in_progress_end_with_their_worker_unless_it_drains(
    short_path: Path, farewell: bytes, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pool.client.MARGINS", replace(MARGINS, silence_s=SILENCE_S))
    plan, admission = make_pool(short_path)
    lose, release = threading.Event(), threading.Event()
    with serving(short_path, slot_worker(farewell, lose, release)), ThreadPoolExecutor() as pool:
        watcher = PoolWatcher(plan, admission, ack_s=0.2)
        until(lambda: admission.states()[0].state == "warm", 5, "a warm slot")
        call = watcher.clients[0].call(GenerateRequest(prompt="a"), time.monotonic() + 30, attempt=5)
        branch = pool.submit(list, call.lines())
        time.sleep(0.05)  # until it is accepted
        lost_at = time.monotonic()
        lose.set()
        if is_ended:
            with pytest.raises(BranchError) as caught:
                branch.result(SILENCE_S + 2)
            assert (caught.value.code, caught.value.is_retryable) == ("slot_lost", True)
            assert time.monotonic() - lost_at < SILENCE_S + 1
        else:
            until(lambda: admission.states()[0].state != "warm", 5, "a slot that drains")
            time.sleep(0.2)
            assert not branch.done()
            call.cancel()
            with pytest.raises(BranchError):
                branch.result(5)
        release.set()


def test_requests_that_wait_are_refused_when_no_worker_comes(short_path: Path) -> None:
    plan, admission = make_pool(short_path, max_down_s=0.3)
    PoolWatcher(plan, admission, ack_s=0.2)
    begin = time.monotonic()
    with pytest.raises(NotReady, match="none is expected soon"):
        admission.reserve(claim(timeout_s=30), 3)
    assert 0.2 < time.monotonic() - begin < 5


def test_failures_of_replaced_workers_stay_counted() -> None:
    totals = FailureTotals()

    def counters(pid: int, state: SlotState = "warm", **failures: int) -> dict[str, float]:
        own = {f"failures.{kind}": count for kind, count in failures.items()}
        return totals.added_to(State(state=state, pid=pid, counters={"restarts": 2.0, **own})).counters

    assert counters(1) == {"restarts": 2}
    assert counters(1, hang=1) == {"restarts": 2, "failures.hang": 1}
    assert totals.added_to(State(state="down", pid=1)).counters == {"failures.hang": 1}
    assert counters(2) == {"restarts": 2, "failures.hang": 1}
    assert counters(2, hang=2, device_error=1) == {"restarts": 2, "failures.hang": 3, "failures.device_error": 1}
    assert counters(2, hang=2, device_error=1) == counters(3)


@pytest.mark.parametrize(
    ("protocol", "oldest", "reason"),
    [(PROTOCOL + 1, PROTOCOL + 1, "upgrade the gateway"), (0, 0, "upgrade the worker")],
)
def test_a_worker_of_a_version_that_does_not_fit_gets_no_branches_and_says_why(
    short_path: Path, protocol: int, oldest: int, reason: str
) -> None:
    plan, admission = make_pool(short_path)
    state = State(state="warm", version="9.9", protocol=protocol, oldest_protocol=oldest)
    with serving(short_path, lambda connection: connection.sendall(HEAD + line(state))):
        PoolWatcher(plan, admission, ack_s=0.2)
        until(lambda: reason in (admission.states()[0].reason or ""), 5, reason)
    assert admission.states()[0].state == "down"


@pytest.mark.parametrize("fields", [{}, {"protocol": PROTOCOL + 1, "oldest_protocol": PROTOCOL}])
def test_a_worker_of_another_version_that_fits_serves(short_path: Path, fields: dict[str, int]) -> None:
    """Of the first version, which does not say its protocol, or of a later one."""
    plan, admission = make_pool(short_path)
    release = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(HEAD + line(State(state="warm", **fields)))  # type: ignore[arg-type]
        release.wait(10)

    with serving(short_path, answer):
        PoolWatcher(plan, admission, ack_s=0.2)
        until(lambda: admission.states()[0].state == "warm", 5, "a warm slot")
        release.set()
