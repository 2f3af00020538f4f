"""The frame of every benchmark run: its document, its progress bar, its server under test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.load import machine
from deploy.load.report import Document, print_machine
from deploy.load.server import Server
from deploy.load.workload import Workload


@contextmanager
def measured_run(
    bench: str,
    console: Console,
    model: str,
    device: str,
    settings: Mapping[str, str],
    workload: Workload,
    is_quick: bool,
) -> Iterator[Document]:
    """A result document that describes the machine on entry, and has the elapsed time and other load on exit.

    Everything that the run starts has to end inside, or its CPU time counts as other load.
    """
    clock = machine.Clock()
    description, versions = machine.describe(), machine.versions()
    print_machine(console, description, versions)
    document = Document(
        bench=bench,
        command=machine.command_line(),
        started_at=clock.started_at.isoformat(timespec="seconds"),
        is_quick=is_quick,
        machine=description,
        versions=versions,
        model=model,
        device=device,
        settings=dict(settings),
        workload=msgspec.to_builtins(workload),
    )
    yield document
    document.elapsed_s = round(clock.elapsed_s(), 1)
    share = round(clock.others_share_of_cores(), 3)
    document.machine = msgspec.structs.replace(description, others_share_of_cores=share)


@contextmanager
def start_server(console: Console, models: str, settings: dict[str, str]) -> Iterator[Server]:
    """A warm server under test, stopped at the end.

    Args:
        models, settings: as `Server` takes them.

    Raises:
        StartError: it does not get warm.
    """
    with console.status("Starting the server under test …") as status, Server(models, settings) as server:
        status.stop()
        if kernels := server.in_effect().get("kernels in effect"):
            console.print(f"Kernels: {kernels}", highlight=False)
        yield server


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
