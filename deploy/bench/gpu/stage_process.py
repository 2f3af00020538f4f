"""One stage in a process of its own, which is forked after torch and the engine are imported, before CUDA is used.

Importing torch takes seconds, which a run of many stages would spend on each of them.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

import workers.engine.engine  # noqa: F401 - imported once, before the fork
from deploy.bench.gpu.context import LOGS, RESULTS, Context
from deploy.bench.gpu.record import Recorder
from deploy.bench.gpu.stages import STAGES
from shared.telemetry import configure_logging

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(name: str, context: Context) -> None:
    """Run a stage; its output goes to a log of its own. SIGTERM ends it, and what it has started."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then ends its stage
    _redirect(context.out / LOGS / f"{name}.log")
    run_stage(name, context)


def run_stage(name: str, context: Context) -> None:
    """Run a stage in this process."""
    stage = STAGES[name]
    configure_logging("bench", "info")
    if context.is_rehearsal and not torch.cuda.is_available():  # no stand-in either
        context = replace(context, device="cpu:0")
    record = Recorder(context.out / RESULTS / f"{name}.json", name, context.is_rehearsal)
    found: ModuleType = importlib.import_module(f"deploy.bench.gpu.{stage.module}")
    found.run(context, record)
    record.finish()


def _redirect(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
