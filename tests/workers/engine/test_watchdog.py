"""The watchdog, in processes of their own: it ends them."""

from __future__ import annotations

from tests.workers.helpers import run_python

HEADER = """
import os, time
from workers.engine.watchdog import Watchdog
watchdog = Watchdog(0.2, lambda: os._exit(9))
watchdog.arm(time.monotonic())
"""


def run(code: str) -> int:
    return run_python(HEADER + code, 30).returncode


def test_a_step_that_hangs_ends_the_process() -> None:
    assert run("time.sleep(20)") == 9


def test_an_engine_that_rests_is_left_alone_and_its_next_step_is_watched() -> None:
    # faulthandler, which holds for 0.725 s from the first step, is cancelled meanwhile.
    assert run("watchdog.rest(); time.sleep(1.2)") == 0
    assert run("watchdog.rest(); time.sleep(1.2); watchdog.arm(time.monotonic()); time.sleep(20)") == 9


def test_a_step_that_follows_at_once_is_watched() -> None:
    assert run("watchdog.rest(); watchdog.arm(time.monotonic()); time.sleep(20)") == 9


def test_a_step_is_computed_also_if_no_thread_can_be_started_and_a_later_one_is_watched() -> None:
    """A fake for the limit of threads: `faulthandler` starts one each time."""
    assert (
        run("""
import faulthandler
start = faulthandler.dump_traceback_later
def fail(*_, **__):
    raise RuntimeError("unable to start watchdog thread")
faulthandler.dump_traceback_later = fail
time.sleep(0.1)
watchdog.arm(time.monotonic())
faulthandler.dump_traceback_later = start
watchdog.arm(time.monotonic())
time.sleep(20)
""")
        == 9
    )
