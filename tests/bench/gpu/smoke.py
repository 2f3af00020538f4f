"""Stage `smoke`: each kernel against plain torch on this device, for the embedded checkpoint, the models measured and a
shape of Llama's family. Stage `memcheck`: the check of a worker's start under compute-sanitizer.

A kernel that does not compile or differs is an error of its own row, with its traceback in the stage's log.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.bench.gpu.commands import run_command
from tests.bench.gpu.context import LOGS, Context, short, subject
from tests.bench.gpu.record import Recorder, Skipped
from tests.bench.speed.engine_alone import load
from tests.workers.engine.helpers import SMOLLM2
from workers.engine.cuda.kernel_choice import choose_kernels
from workers.engine.cuda.kernels.self_check import CHECKS, MAX_ROWS_ALONE, CheckSetting, KernelCheck
from workers.engine.cuda.step_kernels import StepKernels

MAX_SEQUENCES = 96
LLAMA = "llama"
SANITIZER = "compute-sanitizer"


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


def run_memcheck(context: Context, record: Recorder) -> None:
    record.measure("self-check", partial(_find_memory_errors, context))


def _find_memory_errors(context: Context) -> dict[str, Any]:
    """
    Raises:
        RuntimeError: there are memory errors, or the Triton kernels did not run.
    """
    if shutil.which(SANITIZER) is None:
        raise Skipped(f"{SANITIZER} is not on this machine")
    program = f"from {__name__} import print_choice; print_choice({context.device!r}, {context.dtype!r})"
    done = run_command(
        # Errors that torch's calls of CUDA return, and torch handles, are no memory errors.
        [SANITIZER, "--tool", "memcheck", "--report-api-errors", "no", sys.executable, "-c", program],
        context.limit_s,
        context.out / LOGS / "memcheck-self-check.log",
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # a tensor is an allocation: the end of each is seen
    )
    choice, errors = (re.search(text, done.output) for text in (r"kernels: (.*)", r"ERROR SUMMARY: (\d+) error"))
    if choice is None or errors is None:
        raise RuntimeError(f"exit code {done.code}: {done.last_line}")
    if int(errors[1]) or not (choice[1] == "triton" or context.is_rehearsal):
        raise RuntimeError(f"{errors[1]} errors, kernels: {choice[1]}")
    return {"num_errors": 0, "kernels": choice[1]}


def print_choice(device: str, dtype: str) -> None:
    """The kernels that a worker with the embedded checkpoint takes, after their check."""
    loaded = load(subject("embedded"), device, dtype)
    choice = choose_kernels(loaded.config, loaded.model.token_embedding.dtype, MAX_ROWS_ALONE, torch.device(device))
    print(f"kernels: {choice}", flush=True)
