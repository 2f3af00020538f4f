"""Stage `train`: trains the embedded checkpoint as long as there is time; the same command continues it.

Its weights are exported in files below 16 MiB, whether the run has ended or not.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

from deploy.bench.gpu.commands import run_command
from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import Recorder, Skipped

SHARD_MB = 14
EXPORT_S = 60.0  # of the limit, for evaluation and export
TRAINED = "train"


def run(context: Context, record: Recorder) -> None:
    record.measure("training", lambda: _train(context))


def _train(context: Context) -> dict[str, Any]:
    if context.corpus is None:
        raise Skipped("no corpus: --train CORPUS trains the embedded checkpoint")
    directory = context.out / TRAINED
    command = [
        *(sys.executable, "-m", "workers.training.train", "--corpus", str(context.corpus), "--run", str(directory)),
        *("--shard-mb", str(SHARD_MB)),
    ]
    minutes = max(0.1, (context.limit_s - EXPORT_S) / 60)
    extra = ["--tokens", "20_000", "--no-compile"] if context.is_rehearsal else []
    done = run_command([*command, "--budget-minutes", f"{minutes:.2f}", *extra], context.limit_s - EXPORT_S / 2)
    if done.code != 0:
        raise RuntimeError(f"ended with {done.code}: {done.last_line[:300]}")
    if not (directory / "checkpoint").is_dir():  # stopped by its budget: export what there is
        done = run_command([*command, "--export-only", *extra], EXPORT_S)
    for path in (directory / "checkpoint").glob("*.safetensors"):
        shutil.copy2(path, context.out / path.name)
    log = directory / "log.jsonl"
    return {
        "output": done.output.strip().splitlines()[-5:],
        "last_evaluation": log.read_text().strip().splitlines()[-1] if log.exists() else None,
    }
