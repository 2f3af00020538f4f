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
from workers.engine.cuda.kernels.launch import DEPENDENT_CAPABILITY, Grid, argument_types, target_constants
from workers.engine.cuda.kernels.triton_kernels import PRODUCT_CAPABILITY, TritonKernels
from workers.engine.cuda.step_kernels import TABLE_ROWS, Product
from workers.engine.model.config import ModelConfig
from workers.engine.model.linear import DeviceHead, DeviceLinear
from workers.engine.model.transformer import Norm, gelu_new

CPU = torch.device("cpu")


class CompilingLauncher:
    """Takes the place of a `Launcher`: compiles what it would launch.

    Attributes:
        compiled: kernel name → its largest machine code.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self._is_dependent = capability >= DEPENDENT_CAPABILITY
        self.compiled: dict[str, CompiledKernel] = {}

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Tensor | int | float, **constants: Any) -> None:
        constants |= target_constants(kernel, self.capability, self._is_dependent)
        compiled = compile_kernel(kernel, argument_types(kernel, arguments, constants), constants, self.capability)
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
    kernels.begin(table, *embeddings)
    slots = torch.empty(1, 2, config.n_head, config.head_size, dtype=dtype)
    kernels.attend(torch.empty(1, 3 * config.n_embd, dtype=dtype), slots, table)
    norm = Norm(torch.empty(config.n_embd, dtype=dtype), torch.empty(config.n_embd, dtype=dtype), 1e-5)
    if capability >= PRODUCT_CAPABILITY and dtype != torch.float32:
        for num_rows in (1, 9, 17):
            _multiply(kernels, config, norm, num_rows)
    kernels._norm(torch.empty(1, config.n_embd, dtype=dtype), norm, torch.empty(1, config.n_embd, dtype=dtype))
    logits = torch.empty(1, logits_stride or config.vocab_size)[:, : config.vocab_size]
    kernels.draw(logits, table, torch.empty(1, 4, 1, dtype=torch.float64))
    return launcher.compiled


def _multiply(kernels: TritonKernels, config: ModelConfig, norm: Norm, num_rows: int) -> None:
    width, inner, dtype = config.n_embd, config.n_inner, norm.weight.dtype

    def linear(num_out: int, num_in: int) -> DeviceLinear:
        return DeviceLinear(torch.empty(num_out, num_in, dtype=dtype), torch.empty(num_out, dtype=dtype))

    head = DeviceHead.pad(torch.empty(config.vocab_size, width, dtype=dtype))
    x, y, wide = (torch.empty(num_rows, size, dtype=dtype) for size in (width, width, inner))
    kernels.multiply(Product(linear(3 * width, width), norm), x, None)
    kernels.multiply(Product(linear(width, width), is_added=True), x, y)
    kernels.multiply(Product(linear(inner, width), norm, gelu_new), x, None)
    kernels.multiply(Product(linear(width, inner), is_added=True), x, wide)
    kernels.multiply(Product(head, norm), x, None)


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
    output = _run_tool(compiled, "cuobjdump", "-res-usage")
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", output)}
    # Dynamic shared memory is not in the cubin.
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], max(compiled.shared_bytes, usage["SHARED"]))


def disassemble(compiled: CompiledKernel) -> str:
    """The kernel's instructions, by the nvdisasm that Triton ships."""
    return _run_tool(compiled, "nvdisasm", "-c")


def _run_tool(compiled: CompiledKernel, name: str, *arguments: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(compiled.cubin)
        return subprocess.run([tool, *arguments, path], capture_output=True, text=True, check=True).stdout
