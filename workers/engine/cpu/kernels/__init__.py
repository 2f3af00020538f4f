"""The compiled kernels as a worker uses them: machine code from a file, and the threads that run it.

Knows neither numba nor LLVM: `workers.engine.cpu.kernel_source` is what the file is compiled from, at the first import
on a machine, in half a minute (`workers.engine.cpu.kernel_files`).
"""

from __future__ import annotations

from workers.engine.cpu.kernel_files import kernels
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

HAS_DOT_PRODUCTS, HAS_AMX = kernels().has_dot_products, kernels().has_amx
activate = kernels().functions["activate"]
add_and_norm = kernels().functions["add_and_norm"]
advance = kernels().functions["advance"]
attend = kernels().functions["attend"]
multiply = kernels().functions.get("multiply")  # only where the CPU has its instructions
sample = kernels().functions["sample"]
scale = kernels().functions["scale"]
store_kv = kernels().functions["store_kv"]
