"""Compiles Triton kernels for a compute capability. Needs neither a GPU, a CUDA driver nor a C compiler.

Triton's own launcher is C code that it compiles at run time; `launch.py` replaces it. Cubins are kept in Triton's disk
cache, so a kernel is compiled once per machine. Knows Triton's compiler. Does not know what kernels compute.
"""
# mypy: ignore-errors
# Triton has no type hints.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARP_SIZE = 32
ALIGNMENT = 16  # bytes: pointers with it are read 16 bytes at a time


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A Triton kernel and the options that it is compiled with.

    Attributes:
        function: decorated by `triton.jit`. Its parameters are tensors, int32, float32 and constants.
    """

    function: Any
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        name: str = self.function.__name__
        return name.lstrip("_")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel's machine code.

    Attributes:
        entry: the function's name in `cubin`.
        num_parameters: parameters of the entry: the kernel's arguments, then Triton's scratch pointers, which are null.
        shared_bytes: shared memory of a block.
    """

    entry: str
    cubin: bytes
    num_parameters: int
    num_warps: int
    shared_bytes: int


def compile_kernel(
    kernel: Kernel, argument_types: Sequence[str], constants: Mapping[str, Any], capability: int
) -> CompiledKernel:
    """
    Args:
        argument_types: types of the parameters that are not constants, in order, as Triton writes them: "*bf16", "i32",
            "fp32"; ":16" behind the type of a pointer that is a multiple of 16.
        capability: compute capability, 90 for 9.0.

    Raises:
        RuntimeError: if the kernel needs memory that `launch.py` does not allocate.
    """
    names = kernel.function.arg_names
    types = iter(argument_types)
    signature: dict[str, str] = {}
    attributes = {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name], _, divisor = next(types).partition(":")
        if divisor:
            attributes[(index,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(fn=kernel.function, signature=signature, constexprs=dict(constants), attrs=attributes)
    options = {"num_warps": kernel.num_warps, "num_stages": kernel.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, WARP_SIZE), options=options)
    if compiled.metadata.global_scratch_size:
        raise RuntimeError(f"The kernel {kernel.name} needs scratch memory of Triton's, which is not supported.")
    parameters = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", compiled.asm["ptx"])
    return CompiledKernel(
        entry=compiled.metadata.name,
        cubin=compiled.asm["cubin"],
        num_parameters=parameters[1].count(".param"),
        num_warps=compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
    )
