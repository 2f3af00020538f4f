"""The one place where exceptions of torch, the system and the loader become the engine's failures.

Knows which exceptions mean which kind of failure. Does not know what the engine does about it.
"""

from __future__ import annotations

import torch

from workers.engine.errors import DeviceFailure, EngineFailure, InternalFailure, InvalidOutput, LoadFailure, OutOfMemory

# torch raises a plain RuntimeError where the system has no memory for a tensor on the CPU.
_CPU_ALLOCATOR = "DefaultCPUAllocator"


def step_failure(error: BaseException) -> EngineFailure:
    """The failure that `error`, raised by a step, means; `error` is its cause."""
    if isinstance(error, EngineFailure):
        return error
    if _is_out_of_memory(error):
        failure: EngineFailure = OutOfMemory()
    elif isinstance(error, RuntimeError):  # torch's errors of devices and drivers are RuntimeErrors
        failure = DeviceFailure()
    else:
        failure = InternalFailure()
    failure.__cause__ = error
    return failure


def load_failure(error: BaseException, device: str) -> LoadFailure:
    """The failure that `error`, raised while a model was loaded or warmed up, means; `error` is its cause.

    Args:
        device: "cpu" or "cuda".
    """
    if isinstance(error, LoadFailure):
        return error
    if isinstance(error, InvalidOutput):
        failure = LoadFailure(
            "The model computes values that are not numbers: its weights are damaged, or too large for this data type "
            "(TERCET_DTYPE=fp32 has the widest range)."
        )
    elif _is_out_of_memory(error):
        place = "memory" if device == "cpu" else "GPU memory"
        failure = LoadFailure(
            f"The free {place} does not hold the model and its KV cache: lower TERCET_MAX_BATCH, or serve fewer models "
            "on this device."
        )
    elif isinstance(error, OSError) and error.filename and error.strerror:
        failure = LoadFailure(
            f"{error.filename} cannot be read ({error.strerror}): let the user that Tercet runs as read it."
        )
    else:
        failure = LoadFailure()
    failure.__cause__ = error
    return failure


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)
