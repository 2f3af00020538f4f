"""The kernels compiled ahead of time: what they take of a GPU, and that nothing but Triton is needed."""

from __future__ import annotations

import re
from operator import gt
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.workers.engine.cuda.kernels.ahead_of_time import (
    CompilingLauncher,
    Resources,
    compile_step_kernels,
    disassemble,
    read_resources,
)
from tests.workers.engine.helpers import SMOLLM2
from tests.workers.helpers import run_python
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.step_kernels import Product
from workers.engine.model.config import SHAPES
from workers.engine.model.linear import DeviceLinear

# In the order of a step.
KERNELS = ("begin", "attend", "product", "add_norm", "find_candidates", "draw")
# Model, compute capability, type of the weights. 7.5 (T4) has no bf16. No worker uses the kernels on 12.0.
COMBINATIONS = [
    *(("medium", *each) for each in ((75, torch.float16), (90, torch.float16), (90, torch.float32))),
    *(("medium", capability, torch.bfloat16) for capability in (80, 86, 90, 120)),
    ("llama", 75, torch.float16),
    *(("llama", capability, torch.bfloat16) for capability in (80, 86, 90, 120)),
]
MODELS = SHAPES | {"llama": SMOLLM2}
LOGITS_STRIDE = 50_304  # the vocabulary, padded to a multiple of 64
# `product` and `attend` keep in registers what they load before they wait; in a loop over rows, Triton 3.7 keeps it in
# shared memory. A draw is a block for each row.
MOST = {
    "begin": Resources(40, 0, 0),
    "attend": Resources(255, 0, 4096),
    "product": Resources(255, 16, 73728),
    "add_norm": Resources(48, 0, 2048),
    "find_candidates": Resources(80, 0, 8192),
    "draw": Resources(160, 0, 32768),
}
# Measured for 9 to 16 rows after a norm. It does no harm: no worker takes the kernels on 12.0. The only parameter that
# helps, PRELOADED, gives 16 bytes at half the loads before the wait.
MOST_OF_PRODUCT = {120: Resources(255, 32, 73728)}


@pytest.mark.parametrize(("model", "capability", "dtype"), COMBINATIONS)
def test_kernels_stay_within_registers_and_shared_memory_and_do_not_spill(
    model: str, capability: int, dtype: torch.dtype
) -> None:
    compiled = compile_step_kernels(MODELS[model], dtype, capability, LOGITS_STRIDE)
    used = {name: read_resources(kernel) for name, kernel in compiled.items()}
    has_products = capability >= 80 and dtype != torch.float32
    assert tuple(used) == tuple(name for name in KERNELS if name != "product" or has_products)
    most = {**MOST, "product": MOST_OF_PRODUCT.get(capability, MOST["product"])}
    assert {name: each for name, each in used.items() if any(map(gt, each, most[name])) or not each.registers} == {}


def test_a_product_loads_its_weights_before_it_waits() -> None:
    """ACQBULK is griddepcontrol.wait. Behind it are the loads of x, of which none waits for another."""
    launcher = CompilingLauncher(90)
    kernels = TritonKernels(SHAPES["small"], 1, torch.device("cpu"), launcher)  # type: ignore[arg-type]
    weight, bias = torch.empty(768, 768, dtype=torch.bfloat16), torch.empty(768, dtype=torch.bfloat16)
    x = torch.empty(1, 768, dtype=torch.bfloat16)
    kernels.multiply(Product(DeviceLinear(weight, bias), is_added=True), x, x)
    before, _, after = disassemble(launcher.compiled["product"]).partition("ACQBULK")
    load, multiplication = r"LDG\.E\.128", r"\bHMMA\."
    assert len(re.findall(load, before)) == 6  # 8 columns · 768 · 2 bytes, by 128 threads
    first, *_ = re.split(multiplication, after)
    assert len(re.findall(load, first)) == len(re.findall(load, after)) == 6
    assert len(re.findall(multiplication, after)) == 12


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
    done = run_python(program, 600, PATH=str(empty), CC="", TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(KERNELS)
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) >= len(KERNELS)
