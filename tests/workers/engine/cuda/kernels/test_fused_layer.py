"""Fused layers without a GPU: in Triton's interpreter, and compiled ahead of time.

Triton reads TRITON_INTERPRET when it is imported, so both run in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from workers.engine.cuda.kernels.fused_layer import supports
from workers.engine.model.gpt2 import SHAPES

HERE = Path(__file__).parent
ROOT = HERE.parents[4]
# Of each kind the deepest product; the embedded checkpoint's are smaller in every way.
CASES = ["medium:bf16:80:down", "small:fp16:86:up", "medium:bf16:90"]
# 16-byte loads of weights by each thread before the wait for the kernel before: columns · depth · 2 / 256 / 16.
NUM_LOADS_BEFORE_WAIT = {"qkv": 8, "out": 4, "up": 8, "down": 16, "head": 8}


def run(*arguments: str | Path, is_interpreted: bool) -> str:
    environ = {**os.environ, "TRITON_INTERPRET": str(int(is_interpreted)), "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr
    return child.stdout


def test_in_the_interpreter() -> None:
    out = run("-m", "pytest", "-q", "-p", "no:cacheprovider", HERE / "interpreted_fused_layer.py", is_interpreted=True)
    assert "9 passed" in out


def test_what_a_product_takes_of_a_gpu() -> None:
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in run(HERE / "fused_resources.py", *CASES, is_interpreted=False).splitlines()
    ]
    assert len(rows) == 7
    for row in rows:
        # Two blocks of 256 threads fit in a multiprocessor's 65,536 registers: one of the next kernel, too.
        assert row["registers"] <= 128, row
        assert row["spilled_bytes"] == 0, row
        assert row["shared_bytes"] <= 32 << 10, row
        assert row["num_tensor_core_instructions"] > 0, row
        if row["capability"] >= 90:
            assert row["num_loads_before_wait"] == NUM_LOADS_BEFORE_WAIT[row["kernel"]], row
            assert row["num_loads_after_wait"] > 0, row


def test_what_is_not_supported_has_a_reason() -> None:
    small, xl = SHAPES["small"], replace(SHAPES["small"], n_embd=1600, n_inner=6400)
    for capability in (None, 80, 86, 90):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert supports(capability, small, dtype) is None
            assert supports(capability, SHAPES["medium"], dtype) is None
    assert supports(90, replace(small, activation_function="gelu_fast"), torch.float16) is None
    assert supports(90, xl, torch.bfloat16) is None
    reasons = [
        supports(75, small, torch.float16),
        supports(90, replace(small, activation_function="relu"), torch.float16),
        supports(90, xl, torch.float32),
        supports(90, replace(xl, n_embd=1920), torch.bfloat16),
        supports(90, small, torch.float64),
    ]
    for reason, text in zip(reasons, ["8.0", "relu", "1280", "1920", "float64"], strict=True):
        assert reason is not None
        assert text in reason
