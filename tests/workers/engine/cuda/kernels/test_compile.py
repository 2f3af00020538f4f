"""The kernels compiled ahead of time: what they take of a GPU, and that nothing but Triton is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.bench.kernels import KERNELS, kernels_markdown, measure_kernels

pytest.importorskip("triton")

COMBINATIONS = [(75, "fp16"), (80, "bf16"), (86, "bf16"), (90, "bf16"), (90, "fp16"), (90, "fp32")]
# A block's threads have 65,536 registers: with 64 each, two blocks of 8 warps or four of 4 are on a processor at once.
MAX_REGISTERS = {"begin": 40, "add_norm": 48, "attend": 72, "find_candidates": 80, "draw": 80}
MAX_SHARED_BYTES = {"begin": 0, "add_norm": 2048, "attend": 4096, "find_candidates": 16384, "draw": 32768}


def test_kernels_stay_within_registers_and_shared_memory_and_do_not_spill() -> None:
    rows = measure_kernels("medium", COMBINATIONS, products=["out"])
    products = [row for row in rows if row.kernel == "fused out"]
    assert {row.capability for row in products} == {80, 86, 90}
    assert all(row.registers <= 128 and row.spilled_bytes == 0 for row in products)
    rows = [row for row in rows if row not in products]
    assert {row.kernel for row in rows} == set(KERNELS)
    assert {row.capability for row in rows} == {75, 80, 86, 90}
    assert [row for row in rows if row.spilled_bytes > 0] == []
    assert [row for row in rows if not 0 < row.registers <= MAX_REGISTERS[row.kernel]] == []
    assert [row for row in rows if row.shared_bytes > MAX_SHARED_BYTES[row.kernel]] == []
    assert "| draw | sm_90 | fp32 | " in kernels_markdown(rows)


def test_kernels_are_compiled_without_a_c_compiler(tmp_path: Path) -> None:
    program = (
        "import torch\n"
        "from workers.engine.cuda.kernels.ahead_of_time import compile_step_kernels\n"
        "from workers.engine.model.gpt2 import GPT2Config\n"
        "config = GPT2Config(vocab_size=64, n_embd=64, n_head=1, n_positions=64)\n"
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
