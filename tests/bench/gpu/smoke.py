"""Stage `smoke`: each kernel against plain torch on this device, for the embedded checkpoint, the models measured and a
shape of Llama's family.

A kernel that does not compile or differs is an error of its own row, with its traceback in the stage's log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.bench.gpu.context import Context, short, subject
from tests.bench.gpu.record import Recorder, Skipped
from tests.bench.speed.engine_alone import load
from tests.workers.engine.helpers import SMOLLM2
from workers.engine.cuda.kernels.self_check import CHECKS, CheckSetting, KernelCheck
from workers.engine.cuda.step_kernels import StepKernels

MAX_SEQUENCES = 96
LLAMA = "llama"


def run(context: Context, record: Recorder) -> None:
    for model in dict.fromkeys(("embedded", *context.models, LLAMA)):
        for name, check in CHECKS.items():
            record.measure(f"{short(model)} {name}", partial(_measure, context, model, check))


def _measure(context: Context, model: str, check: Callable[[StepKernels, CheckSetting], KernelCheck]) -> dict[str, Any]:
    if context.is_rehearsal:
        raise Skipped("Triton needs a GPU, or minutes in its interpreter")
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels  # which imports Triton

    device = torch.device(context.device)
    config, dtype = replace(SMOLLM2, n_positions=2048), torch.float16
    if model != LLAMA:
        loaded = load(subject(model), context.device, context.dtype)
        config, dtype = loaded.config, loaded.model.token_embedding.dtype
    found = check(TritonKernels(config, MAX_SEQUENCES, device), CheckSetting(config, dtype, MAX_SEQUENCES, device))
    torch.cuda.synchronize()
    if not found.is_correct:
        raise RuntimeError(f"{found.fault} (bound {found.bound:g})")
    return {"difference": found.difference, "bound": found.bound, "dtype": str(dtype).removeprefix("torch.")}
