"""`tercet bench gpu`: options, live progress, exit status. Imports no torch: only the stages' processes do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.bench.gpu import summary
from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import StageResult
from deploy.bench.gpu.schedule import Progress, compile_cpu_kernels, forget, run_stages
from deploy.bench.gpu.stages import STAGES
from deploy.load import machine
from shared.errors import StartError

err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 150)


def bench_gpu(
    out: Annotated[Path, typer.Option(help="Directory of the results; a run continues what it finds there.")] = Path(
        "build/gpu"
    ),
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Stages, repeatable or separated by commas: {', '.join(STAGES)}."),
    ] = None,
    budget_s: Annotated[float, typer.Option(min=1, help="Time for all stages, in seconds.")] = 560,
    again: Annotated[bool, typer.Option("--again", help="Measure again what has a result.")] = False,
    train: Annotated[
        Path | None,
        typer.Option(help="Corpus: with the time that is left, train the embedded checkpoint.", exists=True),
    ] = None,
    collect: Annotated[
        Path | None, typer.Option(help="After each stage copy summary and archive to this directory.")
    ] = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Without a GPU: run all stages, small; the figures mean nothing.")
    ] = False,
) -> None:
    """Everything that is worth measuring on a machine with a GPU, in stages that can be cut off and continued."""
    stages = [STAGES[name] for name in _choose(only)]
    if train is None:
        stages = [stage for stage in stages if stage.name != "train"]
    gpus = machine.gpus()
    if not gpus and not rehearse:
        raise StartError("This machine has no GPU (nvidia-smi lists none): --rehearse runs all stages without one.")
    if rehearse:  # threads that spin for each other take a shared machine's time
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    out = out.resolve()
    context = Context(out=out, is_rehearsal=rehearse, corpus=None if train is None else train.resolve())
    if again:
        forget(context, [stage.name for stage in stages])
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    err.print(f"{', '.join(gpus) or 'No GPU: a rehearsal'}; results in {out}", soft_wrap=True)
    results: dict[str, StageResult] = {}

    def keep(result: StageResult) -> None:
        results[result.stage] = result
        summary.collect(out, summary.document(results, stages, machine.command_line()), collect)
        if not err.is_terminal:
            err.print(_line(result), soft_wrap=True)

    compiling = None if rehearse else compile_cpu_kernels()
    try:
        with Live(console=err, auto_refresh=False, transient=True) as live:

            def show(progress: Progress) -> None:
                results.update(progress.results)
                if err.is_terminal:
                    live.update(_table(progress, [stage.name for stage in stages]), refresh=True)

            results.update(run_stages(context, stages, budget_s, on_progress=show, on_result=keep))
    finally:
        if compiling is not None:
            compiling.kill()
            compiling.wait()
        found = summary.document(results, stages, machine.command_line())
        files = summary.collect(out, found, collect)
        err.print(_table(Progress(results), [stage.name for stage in stages]))
        for row in found["targets"]:
            against = row["against"] or row["bound"]
            err.print(f"{row['title']}: {row['ours']} ({against}), ratio {row['ratio']}", soft_wrap=True)
        err.print(f"{files[0]}", soft_wrap=True)
    sys.stdout.buffer.write(msgspec.json.encode(found, enc_hook=str) + b"\n")
    if any(result.state in {"failed", "timed out"} or result.errors for result in results.values()):
        raise typer.Exit(1)


def _choose(entries: list[str] | None) -> list[str]:
    chosen = {name for entry in entries or [] for name in entry.split(",") if name}
    if unknown := chosen.difference(STAGES):
        raise typer.BadParameter(f"{min(unknown)} is not a stage; use {', '.join(STAGES)}", param_hint="--only")
    return [name for name in STAGES if not chosen or name in chosen]


def _line(result: StageResult) -> str:
    """One line for each stage where there is no terminal."""
    counts = f"{len(result.rows)} rows, {len(result.errors)} errors, {len(result.skipped)} left out"
    return f"{result.stage}: {result.state} after {result.elapsed_s:.1f} s, {counts}. {result.reason}".strip()


def _table(progress: Progress, names: list[str]) -> Table:
    title = f"{progress.left_s:.0f} s left" if progress.running else None
    table = Table("stage", "what", "state", "rows", "s", "reason", title=title)
    for name in names:
        result = progress.results.get(name)
        is_running = name == progress.running
        state = "running" if is_running else result.state if result else "not run"
        seconds = progress.elapsed_s if is_running else result.elapsed_s if result else None
        table.add_row(
            name, STAGES[name].title, state, str(len(result.rows)) if result else "",
            "" if seconds is None else f"{seconds:.0f}", result.reason[:60] if result else "",
        )  # fmt: skip
    return table
