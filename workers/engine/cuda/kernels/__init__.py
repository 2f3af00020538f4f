"""Triton kernels of a decode step: compiled without a C compiler, launched through the CUDA driver.

Importing this package imports neither Triton nor cuda-bindings, which a machine without a GPU does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from workers.engine.cuda.kernels.triton_kernels import TritonKernels
    from workers.engine.model.gpt2 import GPT2Config


def make_triton_kernels(config: GPT2Config, max_sequences: int, device: torch.device) -> TritonKernels:
    """The Triton kernels for a model, on a GPU, or on a CPU in Triton's interpreter.

    Args:
        max_sequences: rows of the largest batch.

    Raises:
        ModuleNotFoundError: if Triton or cuda-bindings is not installed.
        RuntimeError: if the device is a CPU and Triton's interpreter is off, or the CUDA driver reports an error.
    """
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels

    return TritonKernels(config, max_sequences, device)
