"""A contender's process: results, failures, deaths, and what is left of it afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deploy.load.contender_process import ContenderProcess
from shared.errors import StartError

ROOT = Path(__file__).parents[4]
# Prints the process id of a contender, then waits to be killed.
BENCHMARK = """
import time
from deploy.load.contender_process import ContenderProcess

contender = ContenderProcess("psutil:Process")
print(contender.call("as_dict", ["pid"])["pid"], flush=True)
time.sleep(60)
"""


def fail_to_unpickle() -> None:
    raise RuntimeError("cannot be unpickled")


class Unpicklable:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return fail_to_unpickle, ()


def test_a_contender_is_created_once_and_keeps_its_state() -> None:
    with ContenderProcess("collections:Counter", "abca") as contender:
        assert contender.call("most_common", 1) == [("a", 2)]
        contender.call("update", "bbb")
        assert contender.call("most_common", 1) == [("b", 4)]


def test_a_failure_is_reported_with_its_traceback_and_the_contender_survives() -> None:
    with ContenderProcess("collections:Counter", "abca") as contender:
        with pytest.raises(StartError, match=r"(?s)collections:Counter failed with AttributeError: .*Traceback"):
            contender.call("missing")
        assert contender.call("most_common", 1) == [("a", 2)]


def test_a_contender_that_cannot_be_created_gives_the_reason_at_each_call() -> None:
    with ContenderProcess("deploy.load.nowhere:Thing") as contender:
        for _ in range(2):
            with pytest.raises(StartError, match="ModuleNotFoundError: No module named"):
                contender.call("run")


def test_a_process_that_dies_is_reported_with_its_exit_code_at_each_call() -> None:
    with ContenderProcess("os:_exit", 3) as contender:
        for _ in range(2):
            with pytest.raises(StartError, match="os:_exit ended with exit code 3"):
                contender.call("run")


def test_a_failure_that_cannot_be_pickled_is_reported() -> None:
    with ContenderProcess("subprocess:Popen", ["sleep", "10"]) as contender:
        with pytest.raises(StartError, match="TimeoutExpired"):
            contender.call("wait", 0.01)
        contender.call("kill")
        assert contender.call("wait") == -9


def test_the_process_ends_when_it_is_closed() -> None:
    with ContenderProcess("psutil:Process") as contender:
        pid = contender.call("as_dict", ["pid"])["pid"]
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


def test_the_process_dies_with_a_benchmark_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        contender = psutil.Process(int(benchmark.stdout.readline()))
        benchmark.kill()
    deadline = time.monotonic() + 10
    while contender.is_running() and contender.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not contender.is_running() or contender.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_dies_while_it_starts_is_reported_with_its_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    """The process cannot unpickle its arguments, as when an import fails there."""
    contender = ContenderProcess("collections:Counter", Unpicklable())
    with contender, pytest.raises(StartError, match="collections:Counter ended with exit code 1"):
        contender.call("most_common", 1)
    assert "cannot be unpickled" in capfd.readouterr().err
