"""What the engine survives, and how long it waits before it tries a load again, without an engine and a device."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.workers.engine.helpers import make_sequence
from tests.workers.helpers import run_python
from workers.engine.failure_policy import MAX_SIBLING_DELAY_S, StepFailures, load_pauses, restart_pause_s
from workers.engine.failures import EngineFailure, OutOfMemory
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.sequence import Sequence


def failed(*prompt: int) -> list[tuple[Sequence, EngineFailure]]:
    return [(make_sequence(EngineRequest(prompt, SamplingParams(), 0)), OutOfMemory())]


def test_pauses_double_up_to_half_a_minute() -> None:
    assert list(islice(load_pauses(), 7)) == [1, 2, 4, 8, 16, 30, 30]
    assert [restart_pause_s(number) for number in (0, 1, 2, 5, 6, 100)] == [0, 1, 2, 16, 30, 30]


def test_a_second_failure_is_fatal_unless_a_sequence_drew_its_first_token() -> None:
    failures = StepFailures()
    failures.accept(OutOfMemory())
    failures.count_first_tokens(1)
    failures.accept(OutOfMemory())
    failures.count_first_tokens(0)
    with pytest.raises(OutOfMemory):
        failures.accept(OutOfMemory())


def test_siblings_count_as_one_failure_for_a_while() -> None:
    failures = StepFailures()
    failures.accept_of_sequences(failed(1, 2), now=10.0)
    failures.accept_of_sequences(failed(1, 2), now=10.0 + 0.9 * MAX_SIBLING_DELAY_S)
    with pytest.raises(OutOfMemory):
        failures.accept_of_sequences(failed(1, 2), now=10.0 + 1.1 * MAX_SIBLING_DELAY_S)


def test_another_prompt_is_no_sibling() -> None:
    failures = StepFailures()
    failures.accept_of_sequences(failed(1, 2), now=10.0)
    with pytest.raises(OutOfMemory):
        failures.accept_of_sequences(failed(3), now=10.0)


# The watchdog ends processes, so each test has one of its own.
WATCHDOG = """
import os, time
from workers.engine.failure_policy import Watchdog
watchdog = Watchdog(0.2, lambda: os._exit(9))
watchdog.arm(time.monotonic())
"""


def run(code: str) -> int:
    return run_python(WATCHDOG + code, 30).returncode


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
