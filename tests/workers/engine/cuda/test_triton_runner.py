"""`CudaRunner` with the Triton kernels, in Triton's interpreter: the texts are those of plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
# In a process of its own: Triton reads TRITON_INTERPRET when it is imported.
PROGRAM = """
import json, random, sys
from dataclasses import replace
import torch
from tests.workers.engine.helpers import TINY, peaked_weights, random_ids
from workers.engine.core import EngineCore
from workers.engine.cuda.forward import PLAIN_KERNELS, DecodeKernels
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.runner import CudaRunner
from workers.engine.loader import LoadedModel, build
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.result_stream import ResultStream
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence

torch.set_num_threads(1)
config = replace(TINY, vocab_size=500)
loaded = LoadedModel(build(config, peaked_weights(config), "fp32", device="cpu:0"), "cpu:0", "fp32")
triton = TritonKernels(config, 4, torch.device("cpu:0"))
rng = random.Random(3)
prompts = [tuple(random_ids(rng, length, 500)) for length in (5, 70)]
kinds = [SamplingParams(7), SamplingParams(7, temperature=0), SamplingParams(7, top_k=0, top_p=0.9)]
texts = []
for kernels in (PLAIN_KERNELS, DecodeKernels(lambda _: triton, is_length_bound=False)):
    runner = CudaRunner(loaded, 4, kernels=kernels)
    core = EngineCore(Scheduler(runner.num_entries, 4), runner, eos_id=None)
    streams = []
    for seed, params in enumerate(kinds):
        streams.append(ResultStream())
        request = EngineRequest(prompts[seed % 2], params, seed)
        core.scheduler.add(Sequence(request, streams[-1], start_id=0, healing=None))
    while core.scheduler.sequences:
        core.step()
    texts.append([[*stream.result().token_ids] for stream in streams])
print(json.dumps(texts))
"""


def test_texts_with_the_triton_kernels_are_those_with_plain_torch() -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    plain, triton = json.loads(done.stdout.splitlines()[-1])
    assert [len(text) for text in plain] == [7, 7, 7]
    assert triton == plain
