"""The watchdog, in processes of their own: it ends them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEADER = """
import os, time
from workers.engine.watchdog import Watchdog
watchdog = Watchdog(0.2, lambda: os._exit(9))
watchdog.arm(time.monotonic())
"""


def run(code: str) -> int:
    return subprocess.run([sys.executable, "-c", HEADER + code], cwd=ROOT, timeout=30, check=False).returncode


def test_a_step_that_hangs_ends_the_process() -> None:
    assert run("time.sleep(20)") == 9


def test_an_engine_that_rests_is_left_alone_and_its_next_step_is_watched() -> None:
    # faulthandler, which holds for 0.725 s from the first step, is cancelled meanwhile.
    assert run("watchdog.rest(); time.sleep(1.2)") == 0
    assert run("watchdog.rest(); time.sleep(1.2); watchdog.arm(time.monotonic()); time.sleep(20)") == 9


def test_a_step_that_follows_at_once_is_watched() -> None:
    assert run("watchdog.rest(); watchdog.arm(time.monotonic()); time.sleep(20)") == 9
