"""What a run was asked for, checked once and passed down; and the pieces that both benches begin with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.bench.harness import machine
from deploy.bench.harness.report import Document, print_machine
from deploy.bench.harness.workload import Subject, W, Workload
from shared.errors import StartError
from shared.settings import Settings
from workers.checkpoints.resolve import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`models` is a value of `TERCET_MODELS` with one entry; `settings` are further ones by lower-case name."""

    models: str = "synthetic:small"
    device: str = "cpu"  # cpu, or cuda for the first GPU
    num_rounds: int = 7
    is_quick: bool = False
    seed: int = 0
    settings: Mapping[str, str] = field(default_factory=dict)
    workload: Workload = W

    @property
    def server_settings(self) -> dict[str, str]:
        """Besides the models."""
        return {"devices": "cpu" if self.device == "cpu" else "cuda:0", **self.settings}

    def load_settings(self) -> Settings:
        """As the server under test reads them.

        Raises:
            StartError: naming what is wrong.
        """
        values = {"models": self.models, **self.server_settings}
        loaded = Settings.load({f"TERCET_{name.upper()}": value for name, value in values.items()})
        if len(loaded.models) != 1 or loaded.models[0].count != 1 or len(loaded.devices) != 1:
            raise StartError("A bench measures one worker: name one model, without a count, and one device.")
        return loaded

    @property
    def num_threads(self) -> int:
        """Compute threads of a worker that has the machine to itself."""
        return self.load_settings().cpu_threads or len(os.sched_getaffinity(0))

    def subject(self) -> Subject:
        """
        Raises:
            StartError: the model is not on this machine and cannot be fetched.
        """
        [spec] = self.load_settings().models
        return Subject.of(resolve(spec.name, spec.source))


def begin(bench: str, options: Options, clock: machine.Clock, console: Console) -> Document:
    """A document with everything that is known before measuring; the machine is printed."""
    found, versions = machine.describe(), machine.versions()
    print_machine(console, found, versions)
    return Document(
        bench=bench,
        command=machine.command_line(),
        started_at=clock.started_at.isoformat(timespec="seconds"),
        is_quick=options.is_quick,
        machine=found,
        versions=versions,
        model=options.models,
        device=options.device,
        settings=options.server_settings,
        workload=msgspec.to_builtins(options.workload),
    )


def finish(document: Document, clock: machine.Clock) -> None:
    """Note how long it took and who else used the machine; once everything that was started has ended."""
    document.elapsed_s = round(clock.elapsed_s(), 1)
    share = round(clock.others_share_of_cores(), 3)
    document.machine = msgspec.structs.replace(document.machine, others_share_of_cores=share)


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error; call it with what is being done now, at the beginning of each of `total` turns.

    Where standard error is no terminal, a line at the beginning.
    """
    if not console.is_terminal:
        console.print(f"{what}: {total} turns", highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        num_turns = 0

        def turn(label: str) -> None:
            nonlocal num_turns
            bar.update(task, description=f"{what}: {label}", completed=num_turns)
            num_turns += 1

        yield turn
