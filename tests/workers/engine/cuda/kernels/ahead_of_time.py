"""Compiles the kernels of a model's decode step without a GPU, as they are compiled when they are first launched."""
# mypy: ignore-errors
# Triton has no type hints.

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from workers.engine.cuda.kernels.compile import CompiledKernel, Kernel, compile_kernel
from workers.engine.cuda.kernels.launch import Grid, argument_types, target_constants
from workers.engine.cuda.kernels.self_check import CheckSetting, attention_of, products_of
from workers.engine.cuda.kernels.triton_kernels import PRODUCT_CAPABILITY, TritonKernels
from workers.engine.cuda.step_kernels import TABLE_ROWS
from workers.engine.model.config import ModelConfig

CPU = torch.device("cpu")


class CompilingLauncher:
    """Takes the place of a `Launcher`: compiles what it would launch.

    Attributes:
        compiled: kernel name → its largest machine code.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.compiled: dict[str, CompiledKernel] = {}

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Tensor | int | float, **constants: Any) -> None:
        constants |= target_constants(kernel, self.capability)
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
    kernels, setting = TritonKernels(config, 1, CPU, launcher), _NoNumbers(config, dtype, 1, CPU)
    table = torch.zeros(TABLE_ROWS, 1, dtype=torch.float64)
    row = setting.random(1, config.n_embd)
    kernels.begin(table, row, None if config.rotary else row)
    slots = setting.random(1, 2, config.num_kv_heads, config.head_size)
    kernels.attend(attention_of(setting), setting.random(1, config.qkv_width), slots, table)
    products = products_of(setting)
    if capability >= PRODUCT_CAPABILITY and dtype != torch.float32:
        for num_rows in (1, 9, 17):
            for product in products:
                y = None if product.norm is not None else setting.random(num_rows, product.linear.weight.shape[1])
                kernels.multiply(product, setting.random(num_rows, config.n_embd), y)
    kernels._norm(row, products[0].norm, row)
    logits = torch.empty(1, logits_stride or config.vocab_size)[:, : config.vocab_size]
    kernels.draw(logits, table, torch.empty(1, 4, 1, dtype=torch.float64))
    return launcher.compiled


class _NoNumbers(CheckSetting):
    """Memory that is not filled: what is compiled depends on shapes only."""

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype)


class Resources(NamedTuple):
    """What a compiled kernel takes of a streaming multiprocessor."""

    registers: int  # per thread
    spilled_bytes: int  # per thread, of the stack and of local memory
    shared_bytes: int  # per block


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
