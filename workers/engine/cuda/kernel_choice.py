"""Chooses the kernels of a model's decode step on a GPU.

`torch` is plain torch, `triton` the Triton kernels between the matrix products, `fused` five Triton kernels for each
layer. Kernels that have never run on this model of GPU are compared with plain torch first, and the result is stored:
workers and restarts use the same kernels, and equal seeds give equal texts. `fused` is used only if `tercet tune
--kernels` has measured that it is the fastest. Does not know graphs and batches, nor where results are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import structlog
import torch

from workers.engine.cuda.kernel_store import Gpu, Kernels, KernelStore, StoredChoice, driver_version, kernel_key
from workers.engine.errors import LoadFailure
from workers.engine.model.gpt2 import GPT2Config

# Compute capabilities for which the kernels are compiled ahead of time in the tests, and their registers bounded.
OLDEST_CAPABILITY = (7, 5)
NEWEST_CAPABILITY = (9, 0)
# Module → the package that has it.
REQUIRED_PACKAGES = {"triton": "triton", "cuda.bindings": "cuda-bindings"}
PROCESS_ENDED = "the check of the kernels ended its process; tercet tune --kernels checks them again"
CHECK_FAILED = "the kernels could not be compiled or launched; the worker's log has the reason"
NOT_COMPILED = "the compiled kernels cannot be written: set TERCET_CACHE_DIR to a directory that can be written to"
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
log = structlog.get_logger()

# The first difference between the Triton kernels and plain torch on a device, in words; None if they agree.
CheckFn = Callable[[GPT2Config, torch.dtype, torch.device], str | None]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels to use, and why, if they are the plain ones."""

    kernels: Kernels
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernels}: {self.reason}" if self.reason else self.kernels


def choose_kernels(
    config: GPT2Config,
    dtype: torch.dtype,
    device: torch.device,
    store: KernelStore,
    check: CheckFn | None = None,
) -> KernelChoice:
    """The kernels for a model on a device; the first process on a machine checks them.

    A process that ends during its check leaves a mark, and the next process takes the plain kernels: a kernel that
    makes the device unusable costs one restart.

    Args:
        check: default: `kernels.self_check`.

    Raises:
        LoadFailure: a package is not installed.
        RuntimeError: the device failed during the check, or has no memory for it.
    """
    if device.type != "cuda":
        return KernelChoice("torch")
    gpu = gpu_of(device)
    if reason := refusal(gpu.capability):
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
        if stored is not None:
            choice = KernelChoice("torch", PROCESS_ENDED)
        else:
            store.write(key, StoredChoice("checking"))
            try:
                choice = _checked(config, dtype, device, check or _self_check)
            except OUT_OF_MEMORY:
                store.write(key, None)  # not the kernels' fault
                raise
            except OSError as error:  # nor is this; a compiler writes and reads files
                store.write(key, None)
                log.warning("kernels_rejected", device=gpu.name, reason=NOT_COMPILED, exc_info=error)
                return KernelChoice("torch", NOT_COMPILED)
        store.write(key, StoredChoice(choice.kernels, choice.reason))
    level = log.warning if choice.reason else log.info
    level("kernels_chosen", kernels=choice.kernels, reason=choice.reason, key=key)
    return choice


def refusal(capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability takes the plain kernels; None if it does not have to."""
    if capability < OLDEST_CAPABILITY:
        return f"the kernels need compute capability {_dotted(OLDEST_CAPABILITY)}, this GPU has {_dotted(capability)}"
    if capability > NEWEST_CAPABILITY:
        return (
            f"the kernels are compiled for compute capabilities up to {_dotted(NEWEST_CAPABILITY)}, this GPU has "
            f"{_dotted(capability)}"
        )
    return None


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
    if stored is None or stored.status == "checking":
        return None
    return KernelChoice(stored.status, stored.reason)


def _checked(config: GPT2Config, dtype: torch.dtype, device: torch.device, check: CheckFn) -> KernelChoice:
    """Triton's kernels if they agree with plain torch; raises if the device failed."""
    try:
        difference = check(config, dtype, device)
        torch.cuda.synchronize(device)
    except (*OUT_OF_MEMORY, OSError):
        raise
    except Exception as error:  # a compiler's errors are of any type
        # After an error of the device this fails as well, and ends the load; after a compiler's error it does not.
        torch.cuda.synchronize(device)
        log.warning("kernel_check_failed", exc_info=error)
        return KernelChoice("torch", CHECK_FAILED)
    return KernelChoice("torch", difference) if difference else KernelChoice("triton")


def _self_check(config: GPT2Config, dtype: torch.dtype, device: torch.device) -> str | None:
    from workers.engine.cuda.kernels import self_check  # type: ignore[attr-defined]  # only here: it imports Triton

    found: str | None = self_check(config, dtype, device)
    return found


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
