"""Refuses a dtype that this process cannot compute in on the CPU, before a model is loaded.

`shared.cpu_features` knows the CPU; here torch is asked as well, because ONEDNN_MAX_CPU_ISA can forbid it instructions.
"""

from __future__ import annotations

import torch

from shared import cpu_features
from workers.engine.failures import LoadFailure


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
