"""What this process's torch can do on its device: refuses a dtype or a GPU before a model is loaded, and frees memory.

`shared.cpu_features` knows the CPU; here torch is asked as well, because ONEDNN_MAX_CPU_ISA can forbid it instructions.
`shared.gpu_builds` has the tables of GPUs; `deploy.tuning.gpus` asks the driver before a start.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

import structlog
import torch

from shared import cpu_features
from shared.gpu_builds import build_problem, dtype_problem
from workers.engine.failures import LoadFailure

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
log = structlog.get_logger()


def cpu_dtype_problem(dtype: str) -> str | None:
    """Why `dtype` (a value of TERCET_DTYPE) cannot be computed on this CPU, and what to do; None if it can be."""
    problem = cpu_features.dtype_problem(cpu_features.read(), dtype)
    if problem is None and dtype == "bf16" and has_onednn() and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (
            "oneDNN computes no bf16 here although the CPU could: unset ONEDNN_MAX_CPU_ISA, or set TERCET_DTYPE=auto, "
            "int8 or fp32."
        )
    return problem


def check_cpu(dtype: str) -> None:
    """
    Args:
        dtype: a value of TERCET_DTYPE.

    Raises:
        LoadFailure: the CPU does not compute in `dtype`.
    """
    if (problem := cpu_dtype_problem(dtype)) is not None:
        raise LoadFailure(problem)


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN."""
    return torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call, no-any-return]


def check_gpu(device: str, dtype: str) -> None:
    """
    Args:
        device: a CUDA device.
        dtype: a value of TERCET_DTYPE.

    Raises:
        LoadFailure: torch was built without CUDA or without code for this GPU, or the GPU does not compute in `dtype`.
        RuntimeError: CUDA cannot be initialized.
    """
    if torch.version.cuda is None:
        if torch.cuda.is_available():  # a build for another vendor's GPUs
            return
        raise LoadFailure(
            "The installed torch was built without CUDA: install a build for this GPU (docs/GPU.md has the table), or "
            "set TERCET_DEVICES=cpu."
        )
    _initialize_driver()
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    architectures = torch.cuda.get_arch_list()
    problem = build_problem(name, capability, torch.version.cuda, architectures) or dtype_problem(
        name, capability, dtype
    )
    if problem is not None:
        raise LoadFailure(problem)
    if all(f"{capability[0]}{capability[1]}" not in architecture for architecture in architectures):
        log.info("gpu_not_among_builds", device=name, capability=capability, architectures=architectures)


def _initialize_driver() -> None:
    """Initializes the CUDA driver without the interpreter's lock, which torch would hold meanwhile.

    Of several GPUs without the persistence daemon that takes longer than gunicorn waits for a worker. torch reports
    what is wrong, so an error is ignored here.
    """
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def release_memory() -> None:
    """Frees what only cycles reference (an exception and its frames are one), then the memory that the C library and,
    on a GPU, torch keep for later allocations."""
    gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def device_bytes() -> int:
    """GPU memory that torch's allocator holds in this process; 0 without a GPU."""
    return int(torch.cuda.memory_reserved())
