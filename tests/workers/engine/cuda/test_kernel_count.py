"""How many kernels a decode step and its surroundings launch. See `kernel_counter` for what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest
import torch

from tests.workers.engine.cuda.fake_cuda import FakeCuda, FakeGraph, fake_cuda
from tests.workers.engine.cuda.kernel_counter import CountingKernels, KernelCounter
from tests.workers.engine.helpers import TINY, peaked_weights
from workers.engine.core import EngineCore
from workers.engine.cuda import forward
from workers.engine.cuda import runner as cuda_runner
from workers.engine.cuda.forward import decode
from workers.engine.cuda.runner import CudaRunner
from workers.engine.cuda.step_kernels import TABLE_ROWS, TOP_K, StepKernels, TorchKernels
from workers.engine.draw import Draw
from workers.engine.loader import LoadedModel, build
from workers.engine.model.gpt2 import GPT2
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams
from workers.engine.result_stream import ResultStream
from workers.engine.runner import draw_all
from workers.engine.sampling import sample
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence

NUM_ROWS = 3
MAX_PER_LAYER, MAX_OUTSIDE = 7, 8


def model_of(num_layers: int, vocab_size: int = 500) -> GPT2:
    config = replace(TINY, n_layer=num_layers, vocab_size=vocab_size)
    return build(config, peaked_weights(config), "fp32", device="cpu:0")


def count_step(num_layers: int, make: Callable[[KernelCounter], StepKernels]) -> Counter[str]:
    """Kernels of one decode step."""
    model, counter = model_of(num_layers), KernelCounter()
    slots = torch.zeros(num_layers, 100, 2, TINY.n_head, TINY.head_size)
    table = torch.zeros(TABLE_ROWS, NUM_ROWS, dtype=torch.float64)
    table[TOP_K] = 5
    kernels = make(counter)
    with torch.no_grad(), counter:
        decode(model, slots, table, kernels)
    return counter.counts


def per_layer_and_outside(make: Callable[[KernelCounter], StepKernels]) -> tuple[int, int]:
    two, three = (count_step(number, make).total() for number in (2, 3))
    return three - two, two - 2 * (three - two)


def test_a_step_of_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GELU in the product's epilogue, as on a GPU: four products, two additions with a norm, attention."""
    monkeypatch.setattr(forward, "has_gelu_epilogue", lambda _: True)
    per_layer, outside = per_layer_and_outside(lambda counter: CountingKernels(64, counter))
    assert per_layer <= MAX_PER_LAYER
    assert outside <= MAX_OUTSIDE
    # begin, the last norm, the head's product, two for the draw
    assert (per_layer, outside) == (7, 5)


def test_a_step_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published beside the other. A GPU takes more: about 20 kernels for `topk` alone, which counts as one here."""
    monkeypatch.setattr(forward, "has_gelu_epilogue", lambda _: True)
    assert per_layer_and_outside(lambda _: TorchKernels(64)) == (17, 78)


DRAWN_ON_THE_HOST = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "logit_bias": ((3, 1.0),)},
    {"top_k": 0, "top_p": 0.9},
    {"top_k": 200},
    {"min_p": 0.1},
    {"top_logprobs": 3},
)


def test_rows_that_are_drawn_on_the_host_cost_the_device_copies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager operations on the device for each such row, in a batch with a plain one."""
    counter = KernelCounter()
    num_sampled: list[int] = []

    def sample_on_host(logits: torch.Tensor, draws: Items[Draw]) -> list[GeneratedToken]:
        assert not logits.isnan().any()
        num_sampled.append(len(draws))
        return sample(logits, draws)

    num_steps = 5
    with fake_cuda() as fake:
        runner = CudaRunner(LoadedModel(model_of(2), "cuda", "fp32"), 2)
        core = EngineCore(Scheduler(runner.num_entries, 2), runner, eos_id=None)
        monkeypatch.setattr(cuda_runner, "sample", counter.uncounted(sample_on_host))
        # Of logits on the host.
        monkeypatch.setattr(torch, "cat", counter.uncounted(torch.cat))
        monkeypatch.setattr(cuda_runner, "draw_all", counter.uncounted(draw_all))
        monkeypatch.setattr(FakeGraph, "replay", counter.uncounted(FakeGraph.replay))
        monkeypatch.setattr(FakeCuda, "copy_later", counter.uncounted(FakeCuda.copy_later, "download", 1))
        monkeypatch.setattr(FakeCuda, "finish_copies", counter.uncounted(FakeCuda.finish_copies))
        for fields in DRAWN_ON_THE_HOST:
            for one in (SamplingParams(1 + num_steps, **fields), SamplingParams(1 + num_steps)):
                core.add(Sequence(EngineRequest((5, 6, 7), one, 1), ResultStream(), start_id=0, tokenizer=None))
            while not all(one.token_ids for one in core.sequences):
                core.step()  # prefill and first tokens
            num_sampled.clear()
            counter.counts.clear()
            with torch.no_grad(), counter:
                while core.sequences:
                    core.step()
            assert num_sampled == [1] * num_steps
            # The tokens of all rows, and the logits of one; the table is pinned, and uploaded.
            assert counter.counts == {"download": 2 * num_steps, "aten::clone": num_steps, "aten::copy_": num_steps}
        assert fake.num_replays > num_steps
