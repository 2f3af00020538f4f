"""What the engine's tests share: small models, and engines that end with their test."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.workers.faults import Faults
from workers.engine.engine import Engine, EngineConfig
from workers.engine.loader import LoadedModel, random_weights
from workers.engine.model.gpt2 import GPT2Config
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput

CHECKPOINT = Path(__file__).parents[3] / "workers/checkpoints/embedded"
TINY = GPT2Config(
    vocab_size=512,
    n_positions=640,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_inner=256,
    eos_token_id=None,
)
PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread does; fails rather than hang."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@contextmanager
def running_engine(loaded: LoadedModel, *, step_delay_s: float = 0.0, **settings: Any) -> Iterator[Engine]:
    """A warm engine around `loaded`."""
    settings = {"hang_s": 0.0, "num_threads": 2, **settings}
    fatal: list[BaseException] = []
    config = EngineConfig(**settings)
    engine = Engine(config, lambda _: loaded, runners=Faults(step_delay_s), on_fatal=fatal.append)
    engine.start()
    try:
        wait_until(lambda: engine.status().state == "warm")
        yield engine
    finally:
        engine.stop(grace_s=0)
    assert not fatal


def generate(engine: Engine, prompt: list[int], params: SamplingParams, seed: int = 0, **more: Any) -> SequenceOutput:
    finished = engine.submit(EngineRequest(tuple(prompt), params, seed, **more)).result()
    assert finished.failure is None
    return finished


def random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]


def peaked_weights(config: GPT2Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights ten times as large as usual: what comes out depends on what went in."""
    weights = random_weights(config, seed)
    return {
        name: 10 * tensor if name.startswith("h.") and tensor.dim() == 2 else tensor for name, tensor in weights.items()
    }
