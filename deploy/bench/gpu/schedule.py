"""Runs the stages one after the other, each with a limit, within one budget of time.

Knows processes, limits and result files. Does not know what a stage measures. Imports no torch.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from deploy.bench.gpu.context import LOGS, RESULTS, Context
from deploy.bench.gpu.record import FINAL, StageResult, read_result, write_result
from deploy.bench.gpu.stages import Stage
from deploy.load.server import ROOT

MIN_STAGE_S = 10.0  # no stage is begun with less
STOP_S = 10.0  # from SIGTERM to SIGKILL
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is: for each stage its result so far, if any, and the seconds of the stage that runs."""

    results: dict[str, StageResult]
    running: str | None = None
    elapsed_s: float = 0.0
    left_s: float = 0.0


def run_stages(
    context: Context,
    stages: Sequence[Stage],
    budget_s: float,
    *,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    on_result: Callable[[StageResult], None] = lambda _result: None,
) -> dict[str, StageResult]:
    """Run every stage that has no final result yet; returns all results, those of earlier runs included.

    A stage that fails or runs past its limit keeps its rows, and the next one begins. An exception (SystemExit of a
    signal) ends the stage that runs.
    """
    deadline = time.monotonic() + budget_s
    multiprocessing.get_context("forkserver").set_forkserver_preload(["deploy.bench.gpu.stage_process"])
    results = {stage.name: found for stage in stages if (found := stored(context, stage.name)) is not None}
    for stage in stages:
        if stage.name in results and results[stage.name].state in FINAL:
            continue
        left_s = deadline - time.monotonic()
        if left_s < MIN_STAGE_S:
            break
        limit_s = min(stage.rehearsal_limit_s if context.is_rehearsal else stage.limit_s, left_s)

        def report(elapsed_s: float, stage: Stage = stage) -> None:
            if (found := stored(context, stage.name)) is not None:
                results[stage.name] = found
            on_progress(Progress(results, stage.name, elapsed_s, deadline - time.monotonic()))

        results[stage.name] = _run_stage(replace(context, limit_s=limit_s), stage, report)
        on_result(results[stage.name])
    on_progress(Progress(results))
    return results


def compile_cpu_kernels() -> subprocess.Popen[bytes]:
    """Compile the CPU's kernels, which some GPU tests compare with, while the first stages use the GPU."""
    command = [sys.executable, "-c", "import workers.engine.cpu.kernels"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stored(context: Context, name: str) -> StageResult | None:
    """The result of a stage in an earlier run of the same kind; a rehearsal's figures are no figures of a GPU."""
    found = read_result(context.out / RESULTS / f"{name}.json")
    return found if found is not None and found.is_rehearsal == context.is_rehearsal else None


def forget(context: Context, names: Sequence[str]) -> None:
    """Remove the results of earlier runs."""
    for name in names:
        (context.out / RESULTS / f"{name}.json").unlink(missing_ok=True)


def _run_stage(context: Context, stage: Stage, report: Callable[[float], None]) -> StageResult:
    from deploy.bench.gpu import stage_entry

    path = context.out / RESULTS / f"{stage.name}.json"
    process = multiprocessing.get_context("forkserver").Process(target=stage_entry.main, args=(stage.name, context))
    start_s = time.monotonic()
    process.start()
    try:
        while process.is_alive() and time.monotonic() - start_s < context.limit_s:
            process.join(POLL_S)
            report(time.monotonic() - start_s)
    finally:
        is_late = process.is_alive()
        _end(process)
    result = read_result(path) or StageResult(stage=stage.name, is_rehearsal=context.is_rehearsal)
    if result.state == "partial":
        result.state = "timed out" if is_late else "failed"
        why = f"ended after its limit of {context.limit_s:.0f} s" if is_late else _last_line(context, stage.name)
        result.reason = why if is_late else f"exit code {process.exitcode}: {why}"
        result.elapsed_s = round(time.monotonic() - start_s, 1)
        write_result(path, result)
    return result


def _end(process: BaseProcess) -> None:
    """End a stage and what it has started. SIGTERM first: a server under test is stopped in order."""
    if process.is_alive():
        process.terminate()
        process.join(STOP_S)
    with suppress(ProcessLookupError, PermissionError):
        if process.pid is not None:
            os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _last_line(context: Context, name: str) -> str:
    log: Path = context.out / LOGS / f"{name}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:300] if lines else "no output"
