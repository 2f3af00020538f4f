"""Runs the self-check of the Triton kernels in Triton's interpreter; prints a list of the results as JSON.

In a process of its own, as Triton reads TRITON_INTERPRET when it is imported. The interpreter cuts bfloat16 off where a
GPU rounds.
"""

import json
from dataclasses import asdict, replace
from typing import Any

import torch

from tests.workers.engine.helpers import TINY_LLAMA
from workers.engine.cuda.kernels.self_check import CHECKS, CheckSetting
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.model.config import SHAPES, ModelConfig

CPU = torch.device("cpu")
EMBEDDED = ModelConfig(n_embd=384, n_head=6, n_inner=1536)
# Groups of two query heads; head sizes, widths and depths that are no powers of two.
LLAMA = replace(TINY_LLAMA, n_embd=48, n_inner=200, n_positions=72, vocab_size=64, has_head_norms=False)
QWEN3 = replace(LLAMA, n_head=2, n_kv_head=1, head_dim=40, has_head_norms=True, has_qkv_bias=True, has_mlp_bias=True)
BF16 = torch.bfloat16
DTYPES = (torch.float32, torch.float16, BF16)
Case = tuple[ModelConfig, int]  # and the rows of the largest batch
# Fewer positions and tokens than in a model, as the interpreter takes milliseconds for a block.
LAYERS = {
    "small": (replace(SHAPES["small"], n_positions=72, vocab_size=64), 1),
    "medium": (replace(SHAPES["medium"], n_positions=72, vocab_size=64), 1),
    "embedded": (replace(EMBEDDED, n_positions=256, vocab_size=64), 7),
    # Head size and width are no powers of two; several splits.
    "odd": (ModelConfig(n_embd=72, n_head=3, n_positions=1100, vocab_size=64), 2),
    "llama": (LLAMA, 3),
    # Two splits for each block, and means of three groups of splits.
    "long": (replace(QWEN3, n_positions=64 * 192 + 70), 1),
}
# Tiles of rows that are full and not; depths of a part of a chunk, and of chunks and a part, with 4 and 8 warps.
PRODUCTS = {
    "odd": (ModelConfig(n_embd=72, n_head=3, n_inner=200, n_positions=64, vocab_size=64), 23),
    "deep": (ModelConfig(n_embd=32, n_head=1, n_inner=1100, n_positions=64, vocab_size=64), 9),
    "llama": (LLAMA, 23),
    "qwen3": (QWEN3, 9),
}
DRAWS = {
    "small": (SHAPES["small"], 1),
    "three blocks": (ModelConfig(vocab_size=5000, n_positions=256, n_embd=8, n_head=1), 6),
    "few tokens": (ModelConfig(vocab_size=40, n_positions=256, n_embd=8, n_head=1), 6),
}


class ByTorch(TritonKernels):
    """As on a GPU that lacks the instructions of `product`, and in fp32."""

    def has_equal_products(self, dtype: torch.dtype) -> bool:
        return False


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for shape, case in LAYERS.items():
        results += [run(name, shape, case, dtype) for dtype in DTYPES for name in ("begin", "attend")]
    for shape, case in PRODUCTS.items():
        # In bfloat16 the interpreter cuts off a gate and what it multiplies: with biases more than the bound.
        results += [run("multiply", shape, case, dtype) for dtype in DTYPES if (shape, dtype) != ("qwen3", BF16)]
    results += [run("multiply", shape, PRODUCTS[shape], torch.float32, ByTorch) for shape in ("odd", "llama")]
    results += [run("draw", shape, case, torch.float32) for shape, case in DRAWS.items()]
    print(json.dumps(results))


def run(
    name: str, shape: str, case: Case, dtype: torch.dtype, kernels: type[TritonKernels] = TritonKernels
) -> dict[str, Any]:
    config, max_sequences = case
    check = CHECKS[name](kernels(config, max_sequences, CPU), CheckSetting(config, dtype, max_sequences, CPU))
    found = {"shape": shape, "dtype": str(dtype), "kernels": kernels.__name__}
    return found | {**asdict(check), "is_correct": check.is_correct}
