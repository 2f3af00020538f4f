"""What is done afterwards: in order, whatever raises, and before the process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import structlog

from shared.afterwards import Afterwards

ROOT = Path(__file__).parents[2]


def test_things_are_done_in_their_order_by_another_thread() -> None:
    done: list[tuple[int, str]] = []
    is_last_done = threading.Event()
    afterwards = Afterwards()
    for number in range(5):
        afterwards.do(lambda number=number: done.append((number, threading.current_thread().name)))
    afterwards.do(is_last_done.set)
    assert is_last_done.wait(5)
    assert done == [(number, "afterwards") for number in range(5)]


def test_what_one_raises_is_logged_and_the_next_is_done() -> None:
    is_done = threading.Event()
    afterwards = Afterwards()
    with structlog.testing.capture_logs() as lines:
        afterwards.do(lambda: 1 // 0)
        afterwards.do(is_done.set)
        assert is_done.wait(5)
    assert [line["event"] for line in lines] == ["unknown_error"]


def test_nothing_is_left_when_a_process_ends() -> None:
    code = "from shared.afterwards import Afterwards\na = Afterwards()\nfor n in range(9): a.do(print, n)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(number) for number in range(9)]
