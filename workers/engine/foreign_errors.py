"""The one place where exceptions of torch, the system and the loader become the engine's failures.

The rule for errors of a device: they end the process, wherever they occur, because all that a process computes after
such an error may be wrong, and CUDA's context stays unusable. Code that handles an exception by computing in another
way (a kernel that does not compile, a check that fails) must raise it again if `is_device_error`.

Knows which exceptions mean which kind of failure. Does not know what the engine does about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from workers.engine.failures import (
    DeviceFailure,
    EngineFailure,
    InternalFailure,
    InvalidOutput,
    LoadFailure,
    OutOfMemory,
)

# torch raises a plain RuntimeError where the system has no memory for a tensor on the CPU. It and Python repeat the
# system's text (ENOMEM) where a file or pages cannot be mapped.
_NO_CPU_MEMORY = re.compile(r"DefaultCPUAllocator|Cannot allocate memory")
# Texts of torch (c10/cuda/CUDAException.h, torch/cuda/__init__.py), Triton's launcher and cuda-bindings. torch's own
# class for such errors, AcceleratorError, does not cover a failed initialization.
_DEVICE_ERROR = re.compile(
    r"CUDA error|CUDA_ERROR_|CUDA driver|CUDA initialization|CUBLAS_STATUS_|CUDNN_STATUS_|cuDNN error"
    r"|Triton Error \[CUDA\]|NVIDIA driver|No CUDA GPUs|cudaGetDeviceCount|device-side assert"
)
_NO_DRIVER = re.compile(r"NVIDIA driver|No CUDA GPUs|CUDA driver|CUDA initialization|cudaGetDeviceCount")
_NO_ROOM = (
    "The free {} does not hold the model and its KV cache: lower TERCET_MAX_BATCH, or serve fewer models on this "
    "device."
)
_FULL = re.compile(r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED")


def step_failure(error: BaseException) -> EngineFailure:
    """The failure that `error`, raised by a step, means; `error` is its cause."""
    if isinstance(error, EngineFailure):
        return error
    if _is_out_of_memory(error):
        failure: EngineFailure = OutOfMemory()
    elif isinstance(error, RuntimeError) or is_device_error(error):  # torch's errors of a device are RuntimeErrors
        failure = DeviceFailure()
    else:
        failure = InternalFailure()
    failure.__cause__ = error
    return failure


def load_failure(error: BaseException, device: str) -> EngineFailure:
    """The failure that `error`, raised while a model was loaded, checked or warmed up, means; `error` is its cause.

    A `DeviceFailure` if the device, or its initialization, has failed: only a new process can try again. Else a
    `LoadFailure`.

    Args:
        device: "cpu", or a GPU's.
    """
    if isinstance(error, LoadFailure | DeviceFailure):
        return error
    failure: EngineFailure
    if isinstance(error, InvalidOutput):
        failure = LoadFailure(
            "The model computes values that are not numbers: its weights are damaged, or too large for this data type "
            "(TERCET_DTYPE=fp32 has the widest range)."
        )
    elif _is_out_of_memory(error):
        place = "memory" if device == "cpu" else "GPU memory"
        failure = LoadFailure(_NO_ROOM.format(place))
    elif is_device_error(error):
        failure = DeviceFailure(_device_detail(error))
    elif isinstance(error, OSError) and error.filename and error.strerror:
        failure = LoadFailure(
            f"{error.filename} cannot be read ({error.strerror}): let the user that Tercet runs as read it."
        )
    else:
        failure = LoadFailure()
    failure.__cause__ = error
    return failure


def request_failure(error: Exception) -> OutOfMemory:
    """The failure of the sequences whose own work, and nothing that others need, has raised `error`.

    Raises:
        Exception: `error` itself, if it is not that the memory did not suffice.
    """
    if not _is_out_of_memory(error):
        raise error
    failure = OutOfMemory()
    failure.__cause__ = error
    return failure


def is_device_error(error: BaseException) -> bool:
    """Whether `error`, or an exception that led to it, is an error of the device, its driver or its initialization.

    Memory that torch's allocator could not get is none.
    """
    return any(
        isinstance(link, torch.AcceleratorError)
        or (not isinstance(link, torch.OutOfMemoryError) and _DEVICE_ERROR.search(str(link)) is not None)
        for link in _chain(error)
    )


def _device_detail(error: BaseException) -> str:
    text = " ".join(map(str, _chain(error)))
    if _FULL.search(text):
        return _NO_ROOM.format("GPU memory")
    if _NO_DRIVER.search(text):
        return (
            "CUDA could not be initialized: check nvidia-smi, the container's access to the GPU, and that the driver "
            "is new enough for this build of torch (docs/GPU.md); TERCET_DEVICES=cpu serves on the CPU."
        )
    return "The device failed while the model was loaded; its worker is being replaced, and its log has the reason."


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and the exceptions that it was raised from or while they were handled."""
    seen: set[int] = set()
    pending = [error]
    while pending:
        link = pending.pop()
        if id(link) not in seen:
            seen.add(id(link))
            yield link
            pending += [before for before in (link.__cause__, link.__context__) if before is not None]


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_CPU_MEMORY.search(str(error)) is not None
