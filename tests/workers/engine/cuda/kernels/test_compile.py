"""The kernels compiled ahead of time: what they take of a GPU, and that nothing but Triton is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.workers.engine.cuda.kernels.ahead_of_time import compile_step_kernels, read_resources
from workers.engine.model.config import SHAPES

# In the order of a step.
KERNELS = ("begin", "add_norm", "attend", "find_candidates", "draw")
# Compute capability, type of the weights. 7.5 (T4) has no bf16.
COMBINATIONS = [
    (75, torch.float16),
    (80, torch.bfloat16),
    (86, torch.bfloat16),
    (90, torch.bfloat16),
    (90, torch.float16),
    (90, torch.float32),
]
LOGITS_STRIDE = 50_304  # the vocabulary, padded to a multiple of 64
# A block's threads have 65,536 registers: with 64 each, two blocks of 8 warps or four of 4 are on a processor at once.
MAX_REGISTERS = {"begin": 40, "add_norm": 48, "attend": 72, "find_candidates": 80, "draw": 80}
MAX_SHARED_BYTES = {"begin": 0, "add_norm": 2048, "attend": 4096, "find_candidates": 16384, "draw": 32768}


@pytest.mark.parametrize(("capability", "dtype"), COMBINATIONS)
def test_kernels_stay_within_registers_and_shared_memory_and_do_not_spill(capability: int, dtype: torch.dtype) -> None:
    compiled = compile_step_kernels(SHAPES["medium"], dtype, capability, LOGITS_STRIDE)
    used = {name: read_resources(kernel) for name, kernel in compiled.items()}
    assert tuple(used) == KERNELS
    assert {name: each.spilled_bytes for name, each in used.items() if each.spilled_bytes > 0} == {}
    assert {name: each for name, each in used.items() if not 0 < each.registers <= MAX_REGISTERS[name]} == {}
    assert {name: each for name, each in used.items() if each.shared_bytes > MAX_SHARED_BYTES[name]} == {}


def test_kernels_are_compiled_without_a_c_compiler(tmp_path: Path) -> None:
    program = (
        "import torch\n"
        "from tests.workers.engine.cuda.kernels.ahead_of_time import compile_step_kernels\n"
        "from workers.engine.model.config import ModelConfig\n"
        "config = ModelConfig(vocab_size=64, n_embd=64, n_head=1, n_positions=64)\n"
        "print(*compile_step_kernels(config, torch.float16, 90))\n"
    )
    empty = tmp_path / "bin"
    empty.mkdir()
    environment = {
        "PATH": str(empty),
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(KERNELS)
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) >= len(KERNELS)
