"""The check of the real Triton kernels, and a decode step with those that were chosen, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so this runs in a process of its own, on the CPU. The stand-in for
`torch.cuda` only answers what a check asks of the device.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[4]
PROGRAM = """
import torch
from tests.workers.engine.cuda.fake_cuda import fake_cuda
from workers.engine.cuda.forward import decode
from workers.engine.cuda.kernel_choice import check_kernels, make_kernels
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.step_kernels import MAX_STEPS
from workers.engine.loader import random_model
from workers.engine.model.gpt2 import GPT2Config

cpu, rows = torch.device("cpu"), 1
config = GPT2Config(vocab_size=200, n_positions=32, n_embd=32, n_layer=1, n_head=2, n_inner=128, eos_token_id=0)
with fake_cuda(), torch.inference_mode():
    print(check_kernels(config, torch.float32, rows, cpu))
    model = random_model(config, dtype="fp32", device="cpu:0").model
    logits = []
    for name in ("torch", "triton"):
        kernels = make_kernels(name, model, rows, cpu)
        generator = torch.Generator().manual_seed(0)
        layers = torch.randn(config.n_layer, 200, 2, config.n_head, config.head_size, generator=generator)
        draw = (1.0, 5, 0.9, 0.5, 1, 0, *[0.5] * MAX_STEPS)
        columns = [[row, 5, 0, 100 + 20 * row - 5, 0, 5, *draw] for row in range(rows)]
        table = torch.tensor(columns, dtype=torch.float64).T.contiguous()
        made = kernels.make(config.n_positions)
        logits.append(decode(model, layers, table, made)[0])
    print(bool((logits[1] - logits[0]).abs().max() < 1e-3))
    right = TritonKernels.add_norm
    TritonKernels.add_norm = lambda self, x, y, norm: right(self, x, y, norm) + 0.1
    print(check_kernels(config, torch.float32, rows, cpu))
"""


def test_right_kernels_are_accepted_and_a_wrong_kernel_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    right, steps, wrong = done.stdout.splitlines()[-3:]
    assert right == "None", done.stdout
    assert steps == "True"
    assert wrong.startswith("add_norm: differs from plain torch by 0.1")
