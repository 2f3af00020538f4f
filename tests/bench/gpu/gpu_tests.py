"""Stage `tests`: every test that is marked `gpu`, in pytest's own process, with the reasons of failures."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from deploy.tuning.load.server import ROOT
from tests.bench.gpu.commands import run_command
from tests.bench.gpu.context import LOGS, Context
from tests.bench.gpu.record import Recorder, Skipped

MAX_REASON_CHARS = 400
SOME_FAILED, NOTHING_COLLECTED = 1, 5  # pytest's exit codes


def run(context: Context, record: Recorder) -> None:
    files = gpu_test_files(ROOT)
    # A file of its own for each row: a run that is cut off keeps those that have ended.
    for path in files:
        record.measure(path, partial(_run_file, path, context, context.limit_s))


def gpu_test_files(root: Path) -> list[str]:
    """Test files with a `gpu` mark, by their text: collecting all tests would import what this machine may lack."""
    found = [path for path in sorted((root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    return [str(path.relative_to(root)) for path in found]


def _run_file(path: str, context: Context, limit_s: float) -> dict[str, Any]:
    log = context.out / LOGS / f"tests-{re.sub(r'[^a-z0-9]+', '-', path)}.log"
    command = [
        # Another machine has other versions of packages, and their warnings say nothing about Tercet.
        *(sys.executable, "-m", "pytest", path, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short"),
        *("-o", "filterwarnings=default", "--timeout", str(max(10, int(limit_s))), "-rfEs", "--durations=5"),
    ]
    done = run_command(command, limit_s, log)
    if done.code == NOTHING_COLLECTED:
        raise Skipped(f"no test of {path} was selected: this machine has no GPU")
    if done.code not in (0, SOME_FAILED):
        raise RuntimeError(f"ended with {done.code or 'its limit'}: {done.last_line[:MAX_REASON_CHARS]}")
    return summarise(done.output)


def summarise(output: str) -> dict[str, Any]:
    """Counts, failures and skips, from what pytest prints."""
    lines = output.strip().splitlines()
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1])}
    reasons = [line[:MAX_REASON_CHARS] for line in lines if line.startswith(("FAILED ", "ERROR ", "SKIPPED "))]
    return {**counts, "reasons": reasons}
