"""Chooses the kernels of a model's decode step on a GPU.

`torch` is plain torch, `triton` the Triton kernels between the matrix products. Kernels that have never run on this
model of GPU are compared with plain torch first, and the result is stored: workers and restarts use the same kernels,
and equal seeds give equal texts. Does not know graphs and batches, nor where results are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import structlog
import torch

from workers.engine.cuda.forward import PLAIN_KERNELS, DecodeKernels
from workers.engine.cuda.kernel_store import (
    CHECKING,
    Gpu,
    Kernels,
    KernelStore,
    StoredChoice,
    driver_version,
    kernel_key,
    refusal,
)
from workers.engine.failures import LoadFailure
from workers.engine.model.config import ModelConfig
from workers.engine.model.transformer import Transformer

# Module → the package that has it.
REQUIRED_PACKAGES = {"triton": "triton", "cuda.bindings": "cuda-bindings"}
PROCESS_ENDED = (
    "the check of the kernels ended its process; delete kernels.json in the cache directory to check them again"
)
CHECK_FAILED = "the kernels could not be compiled or launched; the worker's log has the reason"
NOT_COMPILED = "the compiled kernels cannot be written: set TERCET_CACHE_DIR to a directory that can be written to"
NOT_BUILT = "the kernels are built for GPT-2 only"
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
log = structlog.get_logger()

# The first difference between the Triton kernels and plain torch on a device, in words; None if they agree. The number
# is that of the rows of the largest batch.
CheckFn = Callable[[ModelConfig, torch.dtype, int, torch.device], str | None]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels to use, and why, if they are the plain ones."""

    kernels: Kernels
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernels}: {self.reason}" if self.reason else self.kernels


def choose_kernels(
    config: ModelConfig,
    dtype: torch.dtype,
    max_sequences: int,
    device: torch.device,
    store: KernelStore,
    check: CheckFn | None = None,
) -> KernelChoice:
    """The kernels for a model on a device; the first process on a machine checks them.

    A process that ends during its check leaves a mark, and the next process takes the plain kernels: a kernel that
    makes the device unusable costs one restart.

    Args:
        max_sequences: rows of the largest batch.
        check: default: `kernels.self_check`.

    Raises:
        LoadFailure: a package is not installed.
        RuntimeError: the device failed during the check, or has no memory for it.
    """
    if device.type != "cuda":
        return KernelChoice("torch")
    gpu = gpu_of(device)
    if reason := refusal(gpu.capability) or (None if config.architecture == "gpt2" else NOT_BUILT):
        log.warning("kernels_rejected", device=gpu.name, reason=reason)
        return KernelChoice("torch", reason)
    require_packages()
    key = kernel_key(gpu, config, dtype_name(dtype))
    if choice := _settled(store.read(key)):
        return choice
    with store.locked():
        stored = store.read(key)  # another worker may have finished its check meanwhile
        if choice := _settled(stored):
            return choice
        if stored is not None and stored.status == CHECKING:
            choice = KernelChoice("torch", PROCESS_ENDED)
        else:
            if stored is not None:
                log.warning("kernel_choice_ignored", kernels=stored.status, key=key)
            store.write(key, StoredChoice(CHECKING))
            try:
                difference = check_kernels(config, dtype, max_sequences, device, check)
            except OUT_OF_MEMORY:
                store.write(key, None)  # not the kernels' fault
                raise
            except OSError as error:  # nor is this; a compiler writes and reads files
                store.write(key, None)
                log.warning("kernels_rejected", device=gpu.name, reason=NOT_COMPILED, exc_info=error)
                return KernelChoice("torch", NOT_COMPILED)
            choice = KernelChoice("torch", difference) if difference else KernelChoice("triton")
            torch.cuda.empty_cache()  # the KV cache is sized by what is free
        store.write(key, StoredChoice(choice.kernels, choice.reason))
    level = log.warning if choice.reason else log.info
    level("kernels_chosen", kernels=choice.kernels, reason=choice.reason, key=key)
    return choice


def require_packages() -> None:
    """
    Raises:
        LoadFailure: a package that compiles or launches kernels is not installed.
    """
    for module, package in REQUIRED_PACKAGES.items():
        try:
            is_there = find_spec(module) is not None
        except ModuleNotFoundError:  # its parent is missing
            is_there = False
        if not is_there:
            raise LoadFailure(
                f"The GPU's kernels need the package {package}, which is not installed: pip install {package}, or "
                "install Tercet with its pinned requirements again."
            )


def gpu_of(device: torch.device) -> Gpu:
    """The model of a CUDA device, and its driver."""
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), driver_version())


def dtype_name(dtype: torch.dtype) -> str:
    """bf16, fp16 or fp32."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def _settled(stored: StoredChoice | None) -> KernelChoice | None:
    if stored is None or stored.kernels is None:
        return None
    return KernelChoice(stored.kernels, stored.reason)


def check_kernels(
    config: ModelConfig,
    dtype: torch.dtype,
    max_sequences: int,
    device: torch.device,
    check: CheckFn | None = None,
) -> str | None:
    """Why a model cannot use the Triton kernels on a device; None if it can.

    Args:
        max_sequences: rows of the largest batch.
        check: default: `kernels.self_check`.

    Raises:
        RuntimeError: the device failed, or has no memory for the check.
        OSError: the compiled kernels cannot be written.
    """
    try:
        reason = (check or _self_check)(config, dtype, max_sequences, device)
        torch.cuda.synchronize(device)
    except (*OUT_OF_MEMORY, OSError):
        raise
    except Exception as error:  # a compiler's errors are of any type
        # After an error of the device this fails as well, and ends the load; after a compiler's error it does not.
        torch.cuda.synchronize(device)
        log.warning("kernel_check_failed", exc_info=error)
        return CHECK_FAILED
    return reason


def make_kernels(kernels: Kernels, model: Transformer, max_sequences: int, device: torch.device) -> DecodeKernels:
    """The kernels of a decode step.

    Args:
        max_sequences: rows of the largest batch.
    """
    if kernels == "torch":
        return PLAIN_KERNELS
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels  # which imports Triton

    step_kernels = TritonKernels(model.config, max_sequences, device)
    return DecodeKernels(lambda _length: step_kernels, is_length_bound=False)


def _self_check(config: ModelConfig, dtype: torch.dtype, max_sequences: int, device: torch.device) -> str | None:
    from workers.engine.cuda.kernels import self_check
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels

    kernels = TritonKernels(config, max_sequences, device)
    setting = self_check.CheckSetting(config, dtype, max_sequences, device)
    for result in self_check.check_kernels(kernels, setting):
        if not result.is_correct:
            fault = ", ".join(result.faults) or f"differs from plain torch by {result.difference:.2g}"
            return f"{result.name}: {fault}"
    return None
