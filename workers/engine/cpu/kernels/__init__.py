"""Compiled kernels: what a forward step computes on a CPU between and within its layers.

The modules: `ir` (LLVM helpers), `exponential`, `norms`, `activations`, `kv_store`, `attention`, `int8` (products),
`sampling`, `partition` (work stealing, barrier), `team` (threads and programs), `compile_cache`. They know rows of
numbers and where these lie in memory (`workers.engine.cpu.layouts`); they know no sequences, schedules and models.

Same seed, same text, in any batch: a row must have the same bits whatever is computed with it, and wherever the keys
and values that it reads are stored. So the order of every floating-point operation depends on the row alone; threads
divide rows, heads and outputs, never a sum. Each kernel's docstring gives its order.

A kernel takes the address of a CALL and the number of the calling thread. numba compiles the kernels with the LLVM that
it contains, at the first import on a machine, and caches them. Inner loops of attention, 8-bit products and exp are
written as vector instructions, because no compiler vectorizes them as well.
"""

from __future__ import annotations

from workers.engine.cpu.kernels.activations import activate
from workers.engine.cpu.kernels.attention import attend
from workers.engine.cpu.kernels.int8 import HAS_AMX, HAS_DOT_PRODUCTS, multiply
from workers.engine.cpu.kernels.kv_store import store_kv
from workers.engine.cpu.kernels.norms import add_and_norm, scale
from workers.engine.cpu.kernels.sampling import advance, sample
from workers.engine.cpu.kernels.team import KernelCall, Program, ThreadTeam

__all__ = [
    "HAS_AMX",
    "HAS_DOT_PRODUCTS",
    "KernelCall",
    "Program",
    "ThreadTeam",
    "activate",
    "add_and_norm",
    "advance",
    "attend",
    "multiply",
    "sample",
    "scale",
    "store_kv",
]
