"""Log streams on real pipes, terminals, sockets and full devices: a write neither blocks nor fails, and is counted."""

from __future__ import annotations

import fcntl
import os
import pty
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from shared.telemetry import EXIT_WAIT_S, MAX_QUEUED, LogStream
from tests.e2e.harness import until

Ends = tuple[int, int]


def make_socket() -> Ends:
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


# Descriptors of (reader, writer).
KINDS: dict[str, Callable[[], Ends]] = {"pipe": os.pipe, "terminal": pty.openpty, "socket": make_socket}


@contextmanager
def ends(kind: str) -> Iterator[Ends]:
    reader, writer = KINDS[kind]()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def lines_of(reader: int, last: str) -> list[str]:
    """Read until a line holds `last`; the lines up to there, without a terminal's carriage returns."""
    text = ""
    deadline = time.monotonic() + 30
    while last not in text.rpartition("\n")[0]:
        assert time.monotonic() < deadline, text[-1000:]
        text += os.read(reader, 1 << 20).decode()
    return text.replace("\r", "").splitlines()


def resumed(num_dropped: int) -> str:
    return f"resumed after {num_dropped}\n"


def takes(stream: LogStream) -> bool:
    """Whether a record is written. A terminal has room a little after it was read."""
    num_dropped = stream.num_dropped
    stream.write("again\n")
    return stream.num_dropped == num_dropped


@pytest.mark.parametrize("has_thread", [False, True], ids=["forks", "thread"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_stops_costs_records_and_no_time(kind: str, has_thread: bool) -> None:
    with ends(kind) as (reader, writer):
        stream = LogStream(writer)
        stream.resumed_line = resumed
        if has_thread:
            stream.start()
        stream.write("first\n")
        num_written = 1
        while not stream.num_dropped:
            stream.write(f"{num_written} {'x' * 200}\n")
            num_written += 1
            assert num_written < 10_000
        for _ in range(100):
            stream.write("lost\n")
        assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
        if kind == "terminal":  # it makes room by itself, a moment later, until another buffer is full
            os.read(reader, 1 << 20)
            until(lambda: takes(stream), 5, "room")
            return
        assert stream.num_dropped == 101
        if not has_thread:
            os.read(reader, 1 << 20)
            assert takes(stream)
        lines = lines_of(reader, "resumed")
        assert f"resumed after {stream.num_dropped}" in lines
        assert "lost" not in lines
        assert all(line.endswith("x" * 200) for line in lines if line[0].isdigit())  # none was cut
        stream.write("last\n")
        assert lines_of(reader, "last") == ["last"]


@pytest.mark.parametrize("has_thread", [False, True], ids=["forks", "thread"])
def test_errors_cost_records(has_thread: bool) -> None:
    """The reader of a pipe has ended; a disk is full."""
    reader, broken = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for writer in (broken, full):
        stream = LogStream(writer)
        if has_thread:
            stream.start()
        for _ in range(10):
            assert stream.write("lost\n") == 5
        stream.finish()
        assert stream.num_dropped == 10
        os.close(writer)


def test_a_large_record_arrives_in_parts_and_whole() -> None:
    with ends("pipe") as (reader, writer):
        stream = LogStream(writer)
        stream.write("a" * 100_000 + "\n")  # a pipe takes 65,536 bytes
        assert stream.num_dropped == 0
        begin = os.read(reader, 1 << 20)
        stream.write("b\n")
        assert (begin + os.read(reader, 1 << 20)).decode() == "a" * 100_000 + "\nb\n"


def test_the_queue_is_bounded() -> None:
    with ends("pipe") as (_, writer):
        stream = LogStream(writer)
        stream.start()
        for _ in range(3 * MAX_QUEUED):
            stream.write("x" * 1000)
        assert stream.num_dropped >= 2 * MAX_QUEUED - 100  # the pipe holds 65 records


PROGRAM = """
import os, sys
from shared.telemetry import finish_log, start_log_thread, use_log_streams
use_log_streams()
start_log_thread()
for number in range(500):
    sys.stderr.write(f"{{number}} {{'x' * {width}}}\\n")
{end}
"""
EXITS = {"return": "", "_exit": "finish_log(); os._exit(0)", "error": "raise SystemExit(0)"}


@pytest.mark.parametrize("end", EXITS.values(), ids=EXITS)
def test_every_exit_writes_what_is_queued(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(width=50, end=end)], stderr=subprocess.PIPE, check=True)
    assert len(done.stderr.splitlines()) == 500


@pytest.mark.parametrize("end", EXITS.values(), ids=EXITS)
def test_no_exit_waits_for_a_reader_that_stopped(end: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(width=1000, end=end)]
    with subprocess.Popen(program, stderr=subprocess.PIPE) as process:
        assert process.wait(timeout=30 + EXIT_WAIT_S) == 0


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)], ids=str)
def test_every_command_works_with_closed_streams(closed: tuple[int, ...]) -> None:
    """And no file that is opened later is taken for a stream."""

    def close() -> None:
        for number in closed:
            os.close(number)

    for arguments, status in ((["settings"], 0), (["plan", "--nonsense"], 2), (["health"], 1)):
        done = subprocess.run(
            [sys.executable, "-m", "deploy", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "TERCET_BIND": "127.0.0.1:1"},
            preexec_fn=close,
            check=False,
        )
        assert done.returncode == status, (arguments, done)
        assert 2 in closed or b"Traceback" not in done.stderr
        assert 1 in closed or status or done.stdout


def test_a_stream_is_what_faulthandler_can_write_to() -> None:
    """It writes without Python, so it needs a descriptor that does not block."""
    with ends("pipe") as (_, writer), closing(LogStream(writer)) as stream:
        assert fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK
