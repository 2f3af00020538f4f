"""The command `gpu`: options, progress, exit status. Imports no torch: only the stages' processes do."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import msgspec

from deploy.tuning.gpus import list_gpus
from deploy.tuning.load import run as frame
from shared.errors import StartError
from tests.bench.gpu import summary
from tests.bench.gpu.context import Context
from tests.bench.gpu.record import StageResult
from tests.bench.gpu.stages import STAGES, run_stages, stored
from tests.bench.results import err
from tests.bench.run import names_of


def add_gpu_options(command: ArgumentParser) -> None:
    add = command.add_argument
    add("--out", type=Path, default=Path("build/gpu"), help="directory of results; a run continues what it finds there")
    add("--only", type=names_of("stage", STAGES), default=[*STAGES], help=f"stages: {', '.join(STAGES)}")
    add("--part", choices=("A", "B"), help="half of the stages; each ends within ten minutes")
    add("--budget-s", type=float, default=560, help="time for all stages, in seconds")
    add("--rehearse", action="store_true", help="without a GPU: all stages, small; the figures mean nothing")


def bench_gpu(args: Namespace) -> int:
    """Everything that is worth measuring on a machine with a GPU, in stages that can be cut off and continued."""
    stages = [stage for name in args.only if (stage := STAGES[name]).part == (args.part or stage.part)]
    gpus = [gpu.name for gpu in list_gpus()]
    if not gpus and not args.rehearse:
        raise StartError("This machine has no GPU (nvidia-smi lists none): --rehearse runs all stages without one.")
    if args.rehearse:  # threads that spin for each other take a shared machine's time
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = (Context.rehearsal if args.rehearse else Context)(out=args.out.resolve())
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    err.print(f"{', '.join(gpus) or 'No GPU: a rehearsal'}; results in {context.out}", soft_wrap=True)

    def write_summary() -> tuple[dict[str, Any], Path]:
        results = {stage.name: result for stage in stages if (result := stored(context, stage.name)) is not None}
        found = summary.document(results, stages, frame.command_line())
        return found, summary.write(context.out, found)

    def report(result: StageResult) -> None:
        counts = f"{len(result.rows)} rows, {len(result.errors)} errors, {len(result.skipped)} left out"
        line = f"{result.stage}: {result.state} after {result.elapsed_s:.1f} s, {counts}. {result.reason}"
        err.print(line.strip(), soft_wrap=True)
        write_summary()

    try:
        run_stages(context, stages, args.budget_s, report)
    finally:
        found, path = write_summary()
        err.print(summary.page(found), str(path), soft_wrap=True, markup=False)
    sys.stdout.buffer.write(msgspec.json.encode(found, enc_hook=str) + b"\n")
    results = [result for result in found["stages"].values() if result]
    return int(any(result["state"] in {"failed", "timed out"} or result["errors"] for result in results))
