"""`tercet bench kernels`: what the Triton kernels of a decode step take of a GPU, read from their machine code.

Needs no GPU. Each combination is compiled in one of two processes, or read from Triton's disk cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context

from rich.table import Table

from shared.errors import StartError

# Compute capability → data types that it is compiled for: 7.5 (T4) has no bf16.
COMBINATIONS = {75: ("fp16",), 80: ("fp16", "bf16", "fp32"), 86: ("fp16", "bf16", "fp32"), 90: ("fp16", "bf16", "fp32")}
NUM_PROCESSES = 2
VOCAB_PADDING = 64  # logits are that many numbers apart, or a multiple
# In the order of a step; those of the draw compute in float32 and float64 for any type of weights.
DRAW_KERNELS = ("find_candidates", "draw")
KERNELS = ("begin", "add_norm", "attend", *DRAW_KERNELS)
PRODUCTS = ("qkv", "out", "up", "down", "head")  # of the fused layers
COLUMNS = ("kernel", "architecture", "dtype", "registers", "spilled bytes", "shared bytes")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One compiled kernel: registers and spilled bytes per thread, shared memory per block."""

    kernel: str
    capability: int
    dtype: str
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        numbers = (self.registers, self.spilled_bytes, self.shared_bytes)
        return self.kernel, f"sm_{self.capability}", self.dtype, *(f"{number:,}" for number in numbers)


def measure_kernels(
    shape: str, combinations: Sequence[tuple[int, str]] | None = None, products: Sequence[str] = PRODUCTS
) -> list[KernelRow]:
    """
    Args:
        shape: of `SHAPES`.
        combinations: compute capabilities and data types; None for all.
        products: of the fused layers.

    Raises:
        StartError: if Triton is not installed.
    """
    if find_spec("triton") is None:
        raise StartError("The kernels are compiled by Triton, which is not installed: pip install triton")
    if combinations is None:
        combinations = [(capability, dtype) for capability, dtypes in COMBINATIONS.items() for dtype in dtypes]
    capabilities, dtypes = zip(*combinations, strict=True)
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        measured = list(pool.map(partial(_measure, shape, products), capabilities, dtypes))
    rows = {(row.kernel, row.capability, row.dtype): row for rows in measured for row in rows}
    order = (*KERNELS, *map(fused_name, PRODUCTS))
    return sorted(rows.values(), key=lambda row: (order.index(row.kernel), row.capability, row.dtype))


def fused_name(product: str) -> str:
    return f"fused {product}"


def kernels_table(rows: Sequence[KernelRow]) -> Table:
    table = Table(title="Kernels of a decode step (registers and spills per thread, shared memory per block)")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 3 else "right")
    for row in rows:
        table.add_row(*row.cells)
    return table


def kernels_markdown(rows: Sequence[KernelRow]) -> str:
    """The table for docs/PERFORMANCE.md."""
    lines = [COLUMNS, ("---",) * 3 + ("---:",) * 3, *(row.cells for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _measure(shape: str, products: Sequence[str], capability: int, dtype: str) -> list[KernelRow]:
    import torch

    from workers.engine.cuda.kernels.ahead_of_time import compile_product, compile_step_kernels
    from workers.engine.cuda.kernels.compile import read_resources
    from workers.engine.cuda.kernels.fused_layer import MIN_CAPABILITY, layer_products
    from workers.engine.model.gpt2 import SHAPES

    config = SHAPES[shape]
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    stride = -(-config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    compiled = compile_step_kernels(config, dtypes[dtype], capability, stride)
    if capability >= MIN_CAPABILITY:
        kinds = layer_products(config, dtypes[dtype])
        compiled |= {fused_name(name): compile_product(kinds[name], capability) for name in products}
    rows = []
    for name, kernel in compiled.items():
        used = read_resources(kernel)
        row_dtype = "fp32" if name in DRAW_KERNELS else dtype
        rows.append(KernelRow(name, capability, row_dtype, used.registers, used.spilled_bytes, used.shared_bytes))
    return rows
