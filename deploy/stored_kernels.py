"""Reads which kernels the workers of a plan will use, without CUDA and torch."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.gpu_memory import model_config
from deploy.gpus import query_gpus, read_capability
from shared.plan import Plan, Slot
from shared.settings import Settings
from shared.worker_environment import cache_directory, worker_environment
from workers.engine.cuda.kernel_store import CHECKING, Gpu, KernelStore, kernel_key, refusal

NOT_CHECKED = "not checked yet"
FIRST_BF16_CAPABILITY = (8, 0)


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
    gpu = _read_gpu(worker_environment(slot, plan, settings, environ)["CUDA_VISIBLE_DEVICES"])
    if gpu is None:
        return "unknown: nvidia-smi does not describe this device"
    if reason := refusal(gpu.capability):
        return f"torch: {reason}"
    dtype = settings.model.dtype
    if dtype == "auto":
        dtype = "bf16" if gpu.capability >= FIRST_BF16_CAPABILITY else "fp16"
    choice = store.read(kernel_key(gpu, model_config(plan.model(slot.model)), dtype))
    if choice is not None and choice.kernels is not None:
        return f"{choice.kernels}: {choice.reason}" if choice.reason else choice.kernels
    if choice is not None and choice.status == CHECKING:
        return f"{NOT_CHECKED}: a check runs, or ended its process"
    return NOT_CHECKED


def _read_gpu(entry: str) -> Gpu | None:
    """The GPU of an entry of `CUDA_VISIBLE_DEVICES`, by `nvidia-smi`; None if it does not say (a MIG instance)."""
    for text, driver, name in query_gpus("compute_cap,driver_version,name", f"--id={entry}"):
        if (capability := read_capability(text)) is not None:
            return Gpu(name, capability, driver)
    return None
