"""The frame of a run that measures: its document with machine, other load, versions and command; its progress bar.

Does not import torch.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from deploy.terminal import labelled
from deploy.tuning.gpus import list_gpus
from shared import cpu_features

PACKAGES = ("tercet", "torch", "tokenizers", "gunicorn", "falcon", "httpx")
NOT_INSTALLED = "not installed"
# Share of the cores used by other processes above which a warning is printed.
BUSY_SHARE = 0.05


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


class Document(msgspec.Struct, kw_only=True):
    """The result of one run. Each figure's unit is in its name, or in a field next to it."""

    bench: str
    command: str = msgspec.field(default_factory=command_line)
    # ISO 8601, UTC.
    started_at: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    elapsed_s: float = 0.0
    is_quick: bool  # too few repetitions to quote
    machine: Machine = msgspec.field(default_factory=describe)
    versions: dict[str, str] = msgspec.field(default_factory=versions)
    model: str
    device: str
    settings: dict[str, str]
    workload: dict[str, Any]
    notes: list[str] = []


@contextmanager
def measured_run(document: Document, console: Console) -> Iterator[None]:
    """Print the machine on entry; on exit the document gets the elapsed time and the other load.

    Everything that the run starts has to end inside, or its CPU time counts as other load.
    """
    clock, machine = Clock(), document.machine
    console.print(
        Text.assemble(
            (machine.cpu, "bold"),
            f", {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, ",
            f"{' '.join(machine.flags)}; GPU: {', '.join(machine.gpus) or 'none'}",
        )
    )
    console.print(", ".join(f"{name} {number}" for name, number in document.versions.items()), highlight=False)
    yield
    document.elapsed_s = round(clock.elapsed_s(), 1)
    share = round(clock.others_share_of_cores(), 3)
    document.machine = msgspec.structs.replace(machine, others_share_of_cores=share)


def doubts(document: Document) -> dict[str, str]:
    """Why the figures of a run are not to be relied on: explanations by heading, none if nothing speaks against it."""
    found = {}
    if document.is_quick:
        found["Quick run:"] = "a functional check; do not quote its figures."
    if document.machine.others_share_of_cores > BUSY_SHARE:
        found["The machine was shared:"] = "times are too long and ratios less certain."
    return found


def print_notes(console: Console, document: Document) -> None:
    """The notes, and how far the figures can be trusted."""
    for note in document.notes:
        console.print(Text(note, "dim"))
    share = document.machine.others_share_of_cores
    console.print(Text(f"{document.elapsed_s:.0f} s; other processes used {share:.0%} of the cores.", "dim"))
    for heading, text in doubts(document).items():
        console.print(labelled(heading, "yellow", text))


@contextmanager
def progress(console: Console, title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar. Call the result with a label at the beginning of each of `total` turns.

    Where the console is no terminal, only the title is printed.
    """
    if not console.is_terminal:
        console.print(f"{title}: {total} turns", highlight=False)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        num_turns = 0

        def turn(label: str) -> None:
            nonlocal num_turns
            bar.update(task, description=f"{title}: {label}", completed=num_turns)
            num_turns += 1

        yield turn
