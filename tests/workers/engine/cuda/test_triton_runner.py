"""The Triton kernels in Triton's interpreter: their check, and texts of `CudaRunner`, which are those of plain torch.

`kernels/test_self_check.py` has the checks of each kernel.
"""

from __future__ import annotations

import json

import pytest

from tests.workers.helpers import run_python

# In a process of its own: Triton reads TRITON_INTERPRET when it is imported. The stand-in for `torch.cuda` only answers
# what a check asks of the device. As in a worker, the check makes the kernels once and the steps once more.
PROGRAM = """
import json, os, random
from dataclasses import replace
import torch
from tests.workers.engine.cuda.fake_cuda import fake_cuda
from tests.workers.engine.helpers import TINY, TINY_LLAMA, add, load_peaked, make_core, random_ids, run_to_end
from workers.engine.cuda.kernel_choice import _self_check, make_kernels
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.runner import CudaRunner
from workers.engine.request import EngineRequest, SamplingParams

def check():
    with fake_cuda(), torch.inference_mode():
        return _self_check(small, torch.float32, 1, cpu)

cpu = torch.device("cpu:0")
tiny = {"gpt2": TINY, "llama": TINY_LLAMA}[os.environ["MODEL"]]
small = replace(tiny, vocab_size=200, n_positions=32, n_embd=32, n_inner=64, n_head=2, n_kv_head=tiny.n_kv_head and 1)
torch.set_num_threads(1)
found = [check()]
rng = random.Random(3)
prompts = [tuple(random_ids(rng, length, 500)) for length in (5, 70)]
kinds = [SamplingParams(7), SamplingParams(7, temperature=0), SamplingParams(7, top_k=0, top_p=0.9)]
texts = []
config = replace(tiny, vocab_size=500)
loaded = load_peaked("cpu:0", config)
for name in ("torch", "triton"):
    core = make_core(CudaRunner(loaded, 4, kernels=make_kernels(name, loaded.model, 4, cpu)))
    streams = [add(core, EngineRequest(prompts[seed % 2], params, seed)) for seed, params in enumerate(kinds)]
    run_to_end(core)
    texts.append([[*stream.result().token_ids] for stream in streams])
right = TritonKernels.multiply
TritonKernels.multiply = lambda self, product, x, y: right(self, product, x, y) + 0.1
found.append(check())
print(json.dumps([found, texts]))
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_right_kernels_are_accepted_and_give_the_texts_of_plain_torch_and_a_wrong_kernel_is_named(model: str) -> None:
    pytest.importorskip("triton")
    done = run_python(PROGRAM, 900, MODEL=model, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-2000:]
    (right, wrong), (plain, triton) = json.loads(done.stdout.splitlines()[-1])
    assert right is None
    assert wrong.startswith("multiply: differs from plain torch by 0.")
    assert [len(text) for text in plain] == [7, 7, 7]
    assert triton == plain
