"""Compiles the fused products of models for GPUs, without one, and prints what they take, a JSON object per line.

A script, as Triton's compiler and its interpreter do not run in the same process. Its arguments are cases: shape,
dtype, compute capability and the products' names, as in "medium:bf16:90:qkv,up"; none for all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from workers.engine.cuda.kernels.ahead_of_time import compile_product
from workers.engine.cuda.kernels.compile import read_resources
from workers.engine.cuda.kernels.fused_layer import Product, layer_products
from workers.engine.loader import read_config
from workers.engine.model.gpt2 import SHAPES

SHAPES = {**SHAPES, "embedded": read_config(Path(__file__).parents[5] / "workers/checkpoints/embedded")}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
TRITON = find_spec("triton")
assert TRITON is not None
assert TRITON.origin is not None
DISASSEMBLER = Path(TRITON.origin).parent / "backends/nvidia/bin/nvdisasm"
KINDS = [("fp16", 75), ("bf16", 80), ("fp16", 86), ("bf16", 90), ("fp32", 90)]


def describe(kind: Product, capability: int) -> dict[str, int]:
    """Registers, spilled bytes and shared memory; 16-byte loads of the whole kernel and of those before its wait."""
    compiled = compile_product(kind, capability)
    with TemporaryDirectory() as directory:
        path = Path(directory, "kernel.cubin")
        path.write_bytes(compiled.cubin)
        code = subprocess.run([DISASSEMBLER, "-c", path], capture_output=True, text=True, check=True).stdout
    # What follows waits: ACQBULK is griddepcontrol.wait.
    before, _, after = code.rpartition("ACQBULK")
    return {
        **asdict(read_resources(compiled)),
        "num_loads_before_wait": len(re.findall(r"LDG\.E\S*\.128", before)),
        "num_loads_after_wait": len(re.findall(r"LDG\.E\S*\.128", after)),
        "num_tensor_core_instructions": len(re.findall(r"\bHMMA\.", code)),
    }


def main(cases: list[str]) -> None:
    for case in cases or [f"{shape}:{dtype}:{capability}" for shape, (dtype, capability) in product(SHAPES, KINDS)]:
        shape, dtype, capability, *names = case.split(":")
        kinds = layer_products(SHAPES[shape], DTYPES[dtype])
        for name in names[0].split(",") if names else kinds:
            row = {"kernel": name, "shape": shape, "dtype": dtype, "capability": int(capability)}
            print(json.dumps({**row, **describe(kinds[name], int(capability))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
