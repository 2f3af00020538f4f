"""The watcher against real state streams: a worker starts, ends, and is replaced."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
import structlog

from gateway.pool.admission import Admission
from gateway.pool.watcher import PoolWatcher
from shared.plan import Plan, Slot
from shared.protocol import State
from tests.gateway.pool.helpers import END, HEAD, Answer, line, serving, until


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
    plan = Plan({}, [], [Slot(0, "cpu", "small", str(short_path / "slot.sock"), 3)])
    admission = Admission(plan, "auto", 6)
    with structlog.testing.capture_logs() as events:
        PoolWatcher(plan, admission, ack_s=0.2)  # before its worker exists
        assert admission.states()[0].state == "down"
        for pid in (1, 2):
            answer, stop = worker(pid, farewell)
            with serving(short_path, answer):
                assert until(lambda: admission.states()[0].state == "warm")
                assert admission.states()[0].pid == pid
                for slot in admission.reserve("small", 3, time.monotonic() + 1):
                    admission.release(slot)
                stop.set()
            assert until(lambda: admission.states()[0].state == "down")
    changes = [event["state"] for event in events if event["event"] == "slot_state_changed"]
    assert changes[:2] == ["loading", "warm"]
    assert next(event["reason"] for event in events if event["event"] == "slot_lost") == reason
