"""The frame of a run that measures: its document, what is printed of the machine, its progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from deploy.terminal import labelled
from deploy.tuning.load.machine import Clock, Machine, command_line, describe, versions

# Share of the cores used by other processes above which a warning is printed.
BUSY_SHARE = 0.05


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
