"""Stage `fused`: each implementation of a decode step, and the fused layers without programmatic dependent launch."""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from statistics import median
from typing import Any

from deploy.bench.gpu.context import Context, subject
from deploy.bench.gpu.record import Recorder, Skipped
from deploy.bench.speed.steps import DecodeSteps
from workers.engine.cuda.kernel_store import Kernels

MODULE = "workers.engine.cuda.kernels.fused_layer"
# The constant of MODULE from which on kernels are launched before the one before them has ended.
FIRST_CAPABILITY = "MIN_DEPENDENT_CAPABILITY"
NEVER = 1 << 20
NUM_TOKENS = 150
VARIANTS: dict[str, tuple[Kernels, bool]] = {
    "fused": ("fused", True),
    "fused, no dependent launch": ("fused", False),
    "triton": ("triton", True),
    "torch": ("torch", True),
}


def run(context: Context, record: Recorder) -> None:
    for model in context.models:
        for variant, (kernels, is_dependent) in VARIANTS.items():
            name = f"{model.removeprefix('synthetic:')} {variant}"
            record.measure(name, partial(_measure, context, model, kernels, is_dependent))


def _measure(context: Context, model: str, kernels: Kernels, is_dependent: bool) -> dict[str, Any]:
    if context.is_rehearsal and kernels != "torch":
        raise Skipped("kernels that are launched through the CUDA driver need a GPU")
    if kernels == "fused":
        if importlib.util.find_spec(MODULE) is None:
            raise Skipped(f"{MODULE} is not in this version")
        module = importlib.import_module(MODULE)
        first = getattr(module, FIRST_CAPABILITY)
        if not is_dependent:
            setattr(module, FIRST_CAPABILITY, NEVER)
    try:
        steps = DecodeSteps(subject(model), context.device, context.dtype, max(context.row_counts), kernels)
        counts = sorted(context.row_counts)
        times = {rows: steps.time(rows, NUM_TOKENS, context.warm_up_s / 4, context.num_replays) for rows in counts}
    finally:
        if kernels == "fused" and not is_dependent:
            setattr(module, FIRST_CAPABILITY, first)
    return {f"rows={rows} step_us": round(1e3 * median(values), 2) for rows, values in times.items()}
