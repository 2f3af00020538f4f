"""Stage `fused`: the fused layers, with programmatic dependent launch on and off."""

from __future__ import annotations

import importlib.util

from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import Recorder

MODULE = "workers.engine.cuda.kernels.fused_layer"


def run(_context: Context, record: Recorder) -> None:
    if not _exists(MODULE):
        record.skip("fused layers", f"{MODULE} is not in this version")
        return
    record.skip("fused layers", "this version does not capture a step of fused layers")


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
