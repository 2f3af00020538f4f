"""A log that is closed, full or not read holds nothing up, from the start to the stop (R34)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.telemetry import MAX_QUEUED
from tests.e2e.harness import START_S, Tercet, metric, until

PIPE_BYTES = 65536
NUM_REQUESTS = 20
HANG = 77  # the seed whose step hangs; the watchdog then writes where, and ends the worker
SETTINGS = {
    "grace_s": "6",
    "log": "debug",
    "hang_s": "2",
    "test_faults": f"{HANG}=hang",
}


class LoggedTercet(Tercet):
    """An instance whose standard output and standard error are given."""

    def num_dropped(self) -> float:
        return metric(self, "tercet_log_records_dropped_total")

    def serve_all(self) -> float:
        """Answer completions, and replace a killed worker and a killed gateway, which count from 0 again. Returns how
        many records were dropped before."""
        for _ in range(NUM_REQUESTS):
            assert len(self.ask(length=2)["sentences"]) == 3
        assert self.client.post("/autocomplete", content=b"{").status_code == 400
        assert self.client.post("/jobs", json={"context": "The sea"}).status_code == 202
        num_dropped = self.num_dropped()
        roles = self.processes()
        for process in (roles["workers"][1], roles["gateway"][1]):
            process.kill()
            process.wait()
            until(self._answers, START_S, "an answer after a worker was killed")
        self.wait_until_warm()
        return num_dropped

    def reload(self) -> None:
        before = {slot["pid"] for slot in self.slots()}
        self.process.send_signal(signal.SIGHUP)
        until(lambda: not before & {slot["pid"] for slot in self.slots()}, START_S, "a reload")
        self.wait_until_warm()

    def _answers(self) -> bool:
        try:
            return self.client.post("/autocomplete", json={"context": "The sea", "length": 2}).status_code == 200
        except OSError:
            return False


@contextmanager
def logging_to(base: Path, stream: int | None, **settings: str) -> Iterator[LoggedTercet]:
    tercet = LoggedTercet(base, **SETTINGS, **settings)
    try:
        tercet.start_with(stream)
        tercet.wait_until_warm()
        processes = [process for role in tercet.processes().values() for process in role]
        yield tercet
        assert tercet.stop() == 0
        assert not [process for process in processes if process.is_running()]
    finally:
        tercet.process.kill()  # its pools end with it
        tercet.process.wait()


LOGS: dict[str, Callable[[], int | None]] = {
    "disk full": lambda: os.open("/dev/full", os.O_WRONLY),
    "closed": lambda: None,
}


@pytest.mark.parametrize("make", LOGS.values(), ids=LOGS)
def test_a_log_that_takes_nothing(tmp_path: Path, make: Callable[[], int | None]) -> None:
    stream = make()
    with logging_to(tmp_path, stream) as tercet:
        num_dropped = tercet.serve_all()
        assert stream is None or num_dropped >= NUM_REQUESTS
    if stream is not None:
        os.close(stream)


def read_lines(reader: int, lines: list[bytes]) -> None:
    with open(reader, "rb") as file:
        lines.extend(file)


def test_a_log_that_is_not_read_and_then_is(tmp_path: Path) -> None:
    """The pipe is full before the start; it is read once all has been served."""
    reader, writer = os.pipe()
    os.write(writer, b"\n" * PIPE_BYTES)
    with logging_to(tmp_path, writer) as tercet:
        tercet.serve_all()
        tercet.reload()
        before = {slot["pid"] for slot in tercet.slots()}
        fields = {"context": "The sea", "seed": HANG, "n": 1, "max_time": 0.6}
        assert tercet.client.post("/autocomplete", json=fields).status_code == 504
        until(lambda: before - {slot["pid"] for slot in tercet.slots()}, START_S, "the hanging worker replaced")
        num_dropped = tercet.num_dropped()  # by the master
        for _ in range(2 * MAX_QUEUED):
            tercet.client.get("/health/live")
        assert tercet.num_dropped() > num_dropped
        os.close(writer)
        lines: list[bytes] = []
        reading = threading.Thread(target=read_lines, args=(reader, lines))
        reading.start()

        def resumed() -> list[dict[str, object]]:
            events = [json.loads(line) for line in lines if line.startswith(b"{")]
            return [event for event in events if event["event"] == "log_resumed"]

        until(lambda: {"gateway"} <= {str(event["role"]) for event in resumed()}, 30, "the log's resumption")
        assert all(int(str(event["num_dropped"])) > 0 for event in resumed())
        tercet.ask(length=2)
        until(lambda: any(b"request_finished" in line for line in lines[-20:]), 10, "a record again")
    reading.join(10)
    assert b"unhandled_exception" not in b"".join(lines)
