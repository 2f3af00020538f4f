"""One stage in this process: `python -m tests.bench.gpu.stage_process STAGE OUT LIMIT_S KIND`."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from shared.telemetry import configure_logging
from tests.bench.gpu.context import RESULTS, Context
from tests.bench.gpu.record import Recorder
from tests.bench.gpu.stages import STAGES


def main(name: str, arguments: Sequence[str]) -> None:
    """Run a stage. SIGTERM ends it, and what it has started."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then ends its stage
    configure_logging("bench", "info")
    context = Context.of(arguments)
    if context.is_rehearsal and not torch.cuda.is_available():  # no stand-in either
        context = replace(context, device="cpu:0")
    record = Recorder(context.out / RESULTS / f"{name}.json", name, context.is_rehearsal)
    module, _, function = STAGES[name].function.partition(":")
    getattr(importlib.import_module(f"tests.bench.gpu.{module}"), function)(context, record)
    record.finish()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
