"""The provenance of a figure: machine, other load, versions, command line. Does not import torch."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from deploy.tuning.gpus import list_gpus
from shared import cpu_features

PACKAGES = ("tercet", "torch", "tokenizers", "gunicorn", "falcon", "httpx")
NOT_INSTALLED = "not installed"


class Machine(msgspec.Struct, frozen=True):
    """The machine of a run."""

    cpu: str
    cores: int  # available to this process
    flags: list[str]
    memory_bytes: int
    gpus: list[str]
    system: str
    others_share_of_cores: float = 0.0  # see `Clock.others_share_of_cores`


class Clock:
    """The time since a run began, and the CPU time that other processes used in it."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._busy_s = busy_s(Path("/proc/stat").read_text())
        self._own_s = _own_s()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def others_share_of_cores(self) -> float:
        """The share (0 to 1) of all cores that other processes and the hypervisor used.

        That is the machine's busy time minus the CPU time of this process and of its children that have ended: read it
        at the end of a run. A server that was already running counts as other load. Resolution: one clock tick, 10 ms.
        """
        others_s = busy_s(Path("/proc/stat").read_text()) - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s / self.elapsed_s() / (os.cpu_count() or 1))


def busy_s(stat: str) -> float:
    """Seconds for which the cores were busy, from the text of /proc/stat.

    The sum of user, nice, system, irq, softirq and steal of the first line; see `man 5 proc_stat`.
    """
    ticks = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def describe() -> Machine:
    """This machine, as it is now; raises as `list_gpus`."""
    cpu = cpu_features.read()
    return Machine(
        cpu=cpu.name,
        cores=cpu_features.num_cores(),
        flags=cpu.kernel_flags,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=[gpu.name for gpu in list_gpus()],
        system=platform.platform(),
    )


def versions(more: Iterable[str] = ()) -> dict[str, str]:
    """The versions of Python, of the packages that a figure depends on, and of `more` packages."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *more):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = NOT_INSTALLED
    return found


def command_line() -> str:
    """The command of this run: that of a module that runs by `python -m`, else `tercet`."""
    spec = sys.modules["__main__"].__spec__
    program = ["tercet"] if spec is None else ["python", "-m", spec.parent or spec.name]
    return shlex.join([*program, *sys.argv[1:]])
