"""Threads for calls: how many run, which are reused, and what a call that raises leaves behind."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest
import structlog

from shared.call_threads import CallThreads
from shared.errors import Overloaded

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


@pytest.mark.parametrize("kind", [ZeroDivisionError, BaseException, SystemExit])
def test_a_thread_survives_a_call_that_raises(kind: type[BaseException]) -> None:
    threads = CallThreads("survivor", 1)
    ended = threading.Event()

    def fail() -> None:
        raise kind

    with structlog.testing.capture_logs() as logged:
        threads.submit(fail)
        threads.submit(ended.set)
        assert ended.wait(PATIENCE_S)
    [line] = logged
    assert isinstance(line["exc_info"], kind)


def test_a_call_for_which_no_thread_can_be_started_is_refused_and_a_later_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fake for the limit of threads; tests/e2e/test_engine_failures.py has a real one."""

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, called = CallThreads("scarce", 2), SimpleQueue[int]()
    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logged:
        patched.setattr(threading.Thread, "start", fail)
        for number in range(3):
            with pytest.raises(Overloaded) as caught:
                threads.submit(called.put, number)
            assert int(caught.value.headers["Retry-After"]) > 0
    assert [line["event"] for line in logged] == ["thread_not_started"]  # once
    for number in (3, 4, 5):
        threads.submit(called.put, number)
    assert {called.get(timeout=PATIENCE_S) for _ in range(3)} == {3, 4, 5}
