"""The package of the Triton kernels, as a worker uses it: its check makes the kernels once, its steps once more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[5]
# In a process of its own: other tests import the submodules, which could replace a function of the same name.
MAKE_TWICE = """
import torch
from workers.engine.model.gpt2 import GPT2Config

config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=1, n_head=2, n_inner=128)
for _ in range(2):
    from workers.engine.cuda.kernels import make_triton_kernels

    make_triton_kernels(config, 2, torch.device("cpu"))
"""


def test_the_kernels_can_be_made_twice() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAKE_TWICE],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
