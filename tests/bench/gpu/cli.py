"""The command `gpu`: options, progress, exit status. Imports no torch: only the stages' processes do."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console

from deploy.gpus import list_gpus
from deploy.load import machine
from shared.errors import StartError
from tests.bench.gpu import summary
from tests.bench.gpu.context import Context
from tests.bench.gpu.record import StageResult
from tests.bench.gpu.stages import STAGES, run_stages, stored

err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 150)


def bench_gpu(
    out: Annotated[Path, typer.Option(help="Directory of the results; a run continues what it finds there.")] = Path(
        "build/gpu"
    ),
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Stages, repeatable or separated by commas: {', '.join(STAGES)}."),
    ] = None,
    part: Annotated[
        Literal["A", "B"] | None, typer.Option(help="Half of the stages. Each ends within ten minutes.")
    ] = None,
    budget_s: Annotated[float, typer.Option(min=1, help="Time for all stages, in seconds.")] = 560,
    collect: Annotated[
        Path | None, typer.Option(help="After each stage copy summary and archive to this directory.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Without a GPU: run all stages, small; the figures mean nothing.")
    ] = False,
) -> None:
    """Everything that is worth measuring on a machine with a GPU, in stages that can be cut off and continued."""
    stages = [STAGES[name] for name in choose("--only", "stage", only, STAGES)]
    stages = [stage for stage in stages if part in (None, stage.part)]
    gpus = [gpu.name for gpu in list_gpus()]
    if not gpus and not rehearse:
        raise StartError("This machine has no GPU (nvidia-smi lists none): --rehearse runs all stages without one.")
    if rehearse:  # threads that spin for each other take a shared machine's time
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = (Context.rehearsal if rehearse else Context)(out=out.resolve())
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    err.print(f"{', '.join(gpus) or 'No GPU: a rehearsal'}; results in {context.out}", soft_wrap=True)

    def write_summary() -> tuple[dict[str, Any], list[Path]]:
        results = {stage.name: result for stage in stages if (result := stored(context, stage.name)) is not None}
        found = summary.document(results, stages, machine.command_line())
        return found, summary.collect(context.out, found, collect)

    def report(result: StageResult) -> None:
        counts = f"{len(result.rows)} rows, {len(result.errors)} errors, {len(result.skipped)} left out"
        line = f"{result.stage}: {result.state} after {result.elapsed_s:.1f} s, {counts}. {result.reason}"
        err.print(line.strip(), soft_wrap=True)
        write_summary()

    try:
        run_stages(context, stages, budget_s, report)
    finally:
        found, files = write_summary()
        err.print(summary.page(found), str(files[0]), soft_wrap=True, markup=False)
    sys.stdout.buffer.write(msgspec.json.encode(found, enc_hook=str) + b"\n")
    results = [result for result in found["stages"].values() if result]
    if any(result["state"] in {"failed", "timed out"} or result["errors"] for result in results):
        raise typer.Exit(1)


def choose(option: str, noun: str, entries: Sequence[str] | None, names: Collection[str]) -> list[str]:
    """The names that the entries list, in the order of `names`; all names if there are no entries."""
    chosen = {name for entry in entries or [] for name in entry.split(",") if name}
    if unknown := chosen.difference(names):
        raise typer.BadParameter(f"{min(unknown)} is not a {noun}; use {', '.join(names)}", param_hint=option)
    return [name for name in names if not chosen or name in chosen]
