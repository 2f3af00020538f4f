"""Compiles the kernels of a model's decode step without a GPU, as they are compiled when they are first launched."""
# mypy: ignore-errors
# Triton has no type hints.

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from torch import Tensor

from workers.engine.cuda.kernels.compile import CompiledKernel, Kernel, compile_kernel
from workers.engine.cuda.kernels.launch import Grid, argument_types
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.step_kernels import TABLE_ROWS
from workers.engine.model.config import ModelConfig
from workers.engine.model.transformer import Norm

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
    config: ModelConfig, dtype: torch.dtype, capability: int, logits_stride: int | None = None
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


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes of a streaming multiprocessor.

    Attributes:
        registers: per thread.
        spilled_bytes: per thread, of the stack and of local memory.
        shared_bytes: per block.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


def read_resources(compiled: CompiledKernel) -> Resources:
    """Reads the cubin with the cuobjdump that Triton ships."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(compiled.cubin)
        output = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", output)}
    # Dynamic shared memory is not in the cubin.
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], max(compiled.shared_bytes, usage["SHARED"]))
