"""Reads which kernels the workers of a plan will use, without CUDA and torch."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.gpu_memory import SYNTHETIC_SHAPES
from shared.plan import Model, Plan, Slot
from shared.settings import Settings
from shared.worker_environment import cache_directory, worker_environment
from workers.checkpoints.files import read_config
from workers.engine.cuda.kernel_store import CHECKING, Gpu, KernelStore, kernel_key, refusal

NOT_CHECKED = "not checked yet"
HEAD_SIZE = 64  # of the models with random weights
FIRST_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`kernel_store.Shape`, from a checkpoint's `config.json`."""

    n_layer: int
    n_head: int
    n_embd: int
    n_inner: int
    n_positions: int
    vocab_size: int


def stored_kernels(plan: Plan, settings: Settings, environ: Mapping[str, str]) -> list[tuple[list[int], str]]:
    """The kernels of the slots on GPUs, in words for an operator: slots with the same kernels together."""
    if settings.pool.compute == "cpu":
        return []
    store = KernelStore(cache_directory(settings))
    found: dict[str, list[int]] = {}
    for slot in plan.slots:
        if slot.device != "cpu":
            found.setdefault(_stored(store, slot, plan, settings, environ), []).append(slot.index)
    return [(slots, kernels) for kernels, slots in found.items()]


def _stored(store: KernelStore, slot: Slot, plan: Plan, settings: Settings, environ: Mapping[str, str]) -> str:
    gpu = read_gpu(worker_environment(slot, plan, settings, environ)["CUDA_VISIBLE_DEVICES"])
    if gpu is None:
        return "unknown: nvidia-smi does not describe this device"
    if reason := refusal(gpu.capability):
        return f"torch: {reason}"
    dtype = settings.model.dtype
    if dtype == "auto":
        dtype = "bf16" if gpu.capability >= FIRST_BF16_CAPABILITY else "fp16"
    choice = store.read(kernel_key(gpu, _shape(plan.model(slot.model)), dtype))
    if choice is not None and choice.kernels is not None:
        return f"{choice.kernels}: {choice.reason}" if choice.reason else choice.kernels
    if choice is not None and choice.status == CHECKING:
        return f"{NOT_CHECKED}: a check runs, or ended its process"
    return NOT_CHECKED


def read_gpu(entry: str) -> Gpu | None:
    """The GPU of an entry of `CUDA_VISIBLE_DEVICES`, by `nvidia-smi`; None if it does not say (a MIG instance)."""
    command = ["nvidia-smi", f"--id={entry}", "--query-gpu=compute_cap,driver_version,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    capability, *rest = (part.strip() for part in listed.strip().split(",", 2))
    major, _, minor = capability.partition(".")
    if len(rest) != 2 or not (major.isdecimal() and minor.isdecimal()):
        return None
    driver, name = rest
    return Gpu(name, (int(major), int(minor)), driver)


def _shape(model: Model) -> ModelShape:
    if model.source == "synthetic":
        num_layers, width = SYNTHETIC_SHAPES[model.name]
        return ModelShape(num_layers, width // HEAD_SIZE, width, 4 * width, model.n_ctx, model.vocab_size)
    sizes = read_config(Path(model.directory))
    return ModelShape(
        sizes["n_layer"], sizes["n_head"], sizes["n_embd"], sizes["n_inner"], model.n_ctx, model.vocab_size
    )
