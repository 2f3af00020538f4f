"""What the engine's tests share: small models, and engines that end with their test."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from shared import cpu_features
from tests.workers.faults import Faults
from tests.workers.helpers import EMBEDDED, wait_until
from workers.engine.core import EngineCore, Runner
from workers.engine.engine import DEVICE_RUNNERS, Engine, EngineConfig, RunnerFactory
from workers.engine.failures import EngineFailure
from workers.engine.loader import LoadedModel, ProgressFn, build, random_weights
from workers.engine.model.config import ModelConfig, Rotary
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.engine.scheduler import MAX_CHUNK, Scheduler
from workers.engine.sequence import ResultStream, Sequence
from workers.text.token_healing import TokenHealing

CHECKPOINT = EMBEDDED
needs_bf16 = pytest.mark.skipif(not cpu_features.read().has_bf16, reason="this CPU multiplies no bf16")
CPU_DTYPES = ["fp32", pytest.param("bf16", marks=needs_bf16), "int8"]
TINY = ModelConfig(vocab_size=512, n_positions=640, n_embd=64, n_layer=2, n_head=4, n_inner=256, eos_token_ids=())
TINY_LLAMA = replace(
    TINY,
    architecture="qwen3",
    activation_function="silu",
    n_inner=160,
    n_kv_head=2,
    rotary=Rotary(),
    is_rms_norm=True,
    is_gated=True,
    has_head_norms=True,
    has_qkv_bias=False,
    has_out_bias=False,
    has_mlp_bias=False,
)
# The shape of SmolLM2-135M, with the head norms of Qwen3.
SMOLLM2 = replace(
    TINY_LLAMA, vocab_size=49152, n_positions=8192, n_embd=576, n_layer=30, n_head=9, n_kv_head=3, n_inner=1536
)
PROSE = (
    "The old man looked at the sea and said nothing for a long while. His daughter, who had come "
    "down from the house with a lamp, stood behind him; and neither of them moved until the last "
    "of the boats was in. “They are late,” he said at length, “and the wind is rising.” "
)


@contextmanager
def loading_engine(
    load: Callable[[ProgressFn], LoadedModel], runners: RunnerFactory = DEVICE_RUNNERS, **settings: Any
) -> Iterator[tuple[Engine, list[EngineFailure]]]:
    """An engine that has been started, and its fatal failures; by default a step may take any time."""
    fatal: list[EngineFailure] = []
    engine = Engine(EngineConfig(**{"hang_s": 0.0, **settings}), load, runners=runners, on_fatal=fatal.append)
    engine.start()
    try:
        yield engine, fatal
    finally:
        engine.stop(grace_s=0)


@contextmanager
def running_engine(loaded: LoadedModel, *, step_delay_s: float = 0.0, **settings: Any) -> Iterator[Engine]:
    """A warm engine around `loaded`, which must not fail. With one thread: as many tests run at a time as there are
    cores, and `tests.workers.engine.cpu.test_kernels` compares the texts of a team with its."""
    settings = {"num_threads": 1, **settings}
    with loading_engine(lambda _: loaded, Faults(step_delay_s), **settings) as (engine, fatal):
        wait_until(lambda: engine.status().state == "warm")
        yield engine
    assert not fatal


def make_core(
    runner: Runner, max_sequences: int = 4, *, max_chunk: int = MAX_CHUNK, eos_ids: Collection[int] = (), **hooks: Any
) -> EngineCore:
    """An engine's core, whose steps the test's own thread computes."""
    return EngineCore(
        Scheduler(runner.num_entries, max_sequences, max_chunk=max_chunk), runner, eos_ids=eos_ids, **hooks
    )


def make_sequence(request: EngineRequest, stream: ResultStream | None = None) -> Sequence:
    return Sequence(request, stream or ResultStream(), start_id=0, healing=None)


def add(core: EngineCore, request: EngineRequest, healing: TokenHealing | None = None) -> ResultStream:
    stream = ResultStream()
    core.scheduler.add(Sequence(request, stream, start_id=0, healing=healing))
    return stream


def run_to_end(core: EngineCore) -> None:
    for _ in range(1000):
        if not core.scheduler.sequences:
            return
        core.step()
    raise AssertionError("1000 steps did not finish the sequences")


def results(engine: Engine, requests: Iterable[EngineRequest]) -> list[SequenceOutput]:
    """What the requests give if they are made at once."""
    return [stream.result() for stream in [engine.submit(request) for request in requests]]


def generate(engine: Engine, prompt: list[int], params: SamplingParams, seed: int = 0, **more: Any) -> SequenceOutput:
    finished = engine.submit(EngineRequest(tuple(prompt), params, seed, **more)).result()
    assert finished.failure is None
    return finished


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], output: SequenceOutput, max_error: float) -> None:
    """Each token is the likeliest by transformers' model, given those before it, and as likely."""
    logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs, token_ids = logits.log_softmax(-1).max(-1)
    assert list(output.token_ids) == token_ids.tolist()
    assert list(output.logprobs) == pytest.approx(logprobs.tolist(), abs=max_error)


def random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def load_peaked(device: str, config: ModelConfig = TINY) -> LoadedModel:
    """A model with `peaked_weights`, in fp32."""
    return LoadedModel(build(config, peaked_weights(config), "fp32", device=device), device, "fp32")


def peaked_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights ten times as large as usual: what comes out depends on what went in."""
    weights = random_weights(config, seed)
    return {
        name: 10 * tensor if name.startswith(("h.", "layers.")) and tensor.dim() == 2 else tensor
        for name, tensor in weights.items()
    }
