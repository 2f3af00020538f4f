"""Compiles the kernels of a model's decode step without a GPU, as they are compiled when they are first launched.

For set-up, which fills Triton's disk cache, and for what the kernels take of a GPU. Knows shapes. Launches nothing.
"""
# mypy: ignore-errors
# Triton has no type hints.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.engine.cuda.kernels.compile import CompiledKernel, Kernel, compile_kernel
from workers.engine.cuda.kernels.fused_layer import Product, Target
from workers.engine.cuda.kernels.launch import Grid, argument_types
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.step_kernels import TABLE_ROWS
from workers.engine.model.gpt2 import GPT2Config, Norm

CPU = torch.device("cpu")


class CompilingLauncher:
    """Takes the place of a `Launcher`: compiles what it would launch.

    Attributes:
        compiled: kernel name → its largest machine code.
    """

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.compiled: dict[str, CompiledKernel] = {}

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Tensor | int | float, **constants: Any) -> None:
        compiled = compile_kernel(kernel, argument_types(kernel, arguments, constants), constants, self._capability)
        before = self.compiled.get(kernel.name)
        if before is None or len(before.cubin) < len(compiled.cubin):
            self.compiled[kernel.name] = compiled


def compile_step_kernels(
    config: GPT2Config, dtype: torch.dtype, capability: int, logits_stride: int | None = None
) -> dict[str, CompiledKernel]:
    """
    Args:
        capability: compute capability, 90 for 9.0.
        logits_stride: numbers from one row of logits to the next; None for the vocabulary's size.

    Returns:
        Kernel name → its machine code.
    """
    launcher = CompilingLauncher(capability)
    kernels = TritonKernels(config, 1, CPU, launcher)
    table = torch.zeros(TABLE_ROWS, 1, dtype=torch.float64)
    embeddings = (torch.empty(1, config.n_embd, dtype=dtype) for _ in range(2))
    integers, x = kernels.begin(table, *embeddings)
    norm = Norm(torch.empty(config.n_embd, dtype=dtype), torch.empty(config.n_embd, dtype=dtype), 1e-5)
    for y in (None, x):
        kernels.add_norm(x, y, norm)
    slots = torch.empty(1, 2, config.n_head, config.head_size, dtype=dtype)
    kernels.attend(torch.empty(1, 3 * config.n_embd, dtype=dtype), slots, integers)
    logits = torch.empty(1, logits_stride or config.vocab_size)[:, : config.vocab_size]
    kernels.draw(logits, table)
    return launcher.compiled


def compile_product(kind: Product, capability: int) -> CompiledKernel:
    """A product of the fused layers. Any number of rows runs the same machine code.

    Args:
        capability: compute capability, 90 for 9.0.
    """
    target = Target.of(capability)
    x = torch.empty(1, dtype=kind.dtype)
    out = x.float() if kind.is_float_out else x
    constants = kind.constants(target)
    types, *others = (
        argument_types(target.kernel, [*[x] * 6, out, num_rows, 1e-5], constants) for num_rows in (3, 16, 48)
    )
    assert others == [types] * 2
    return compile_kernel(target.kernel, types, constants, capability)
