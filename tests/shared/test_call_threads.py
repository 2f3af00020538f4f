"""Threads for calls: how many run, which are reused, and what a call that raises leaves behind."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import structlog

from shared.call_threads import CallThreads

PATIENCE_S = 5.0


def test_as_many_calls_run_at_once_as_there_may_be_threads() -> None:
    threads = CallThreads("call", 3)
    started: SimpleQueue[int] = SimpleQueue()
    may_end = threading.Event()

    def call(number: int) -> None:
        started.put(number)
        assert may_end.wait(PATIENCE_S)

    for number in range(5):
        threads.submit(call, number)
    assert sorted(started.get(timeout=PATIENCE_S) for _ in range(3)) == [0, 1, 2]
    assert started.empty()
    may_end.set()
    assert sorted(started.get(timeout=PATIENCE_S) for _ in range(2)) == [3, 4]


def test_threads_are_reused_also_after_calls_have_waited() -> None:
    threads = CallThreads("reused", 2)
    ended: SimpleQueue[str] = SimpleQueue()
    barrier = threading.Barrier(2)

    def call() -> None:
        barrier.wait(PATIENCE_S)
        ended.put(threading.current_thread().name)

    for _ in range(3):  # of each round two calls wait for the other two
        for _ in range(4):
            threads.submit(call)
        assert {ended.get(timeout=PATIENCE_S) for _ in range(4)} == {"reused_1", "reused_2"}


def test_a_thread_survives_a_call_that_raises() -> None:
    threads = CallThreads("survivor", 1)
    ended = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    with structlog.testing.capture_logs() as logged:
        threads.submit(fail)
        threads.submit(ended.set)
        assert ended.wait(PATIENCE_S)
    [line] = logged
    assert isinstance(line["exc_info"], ZeroDivisionError)
