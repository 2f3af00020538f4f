"""Stage `seeds`: whether a seed gives the same text alone and among 48 sequences, in bf16 and fp16.

Matrix products whose order of summation depends on the number of rows change the last bits of logits, and a draw close
to a border then gives another token. The share of equal texts is reported for each dtype and model. Stages
`products` and `pinned` do it where cuBLAS computes all products, and time the step, which its pins may slow down.
"""

from __future__ import annotations

import random
from functools import partial
from statistics import median
from typing import Any

import torch

from tests.bench.gpu.context import Context, short, subject
from tests.bench.gpu.record import Recorder
from tests.bench.gpu.stages import step_key
from tests.bench.gpu.steps import DecodeSteps
from tests.bench.speed.engine_alone import EngineAlone
from tests.workers.engine.helpers import results
from workers.engine.core import Runner
from workers.engine.cpu.team import Interrupt
from workers.engine.cuda.forward import PLAIN_KERNELS
from workers.engine.cuda.runner import CudaRunner
from workers.engine.engine import DEVICE_RUNNERS, EngineConfig, RunnerFactory
from workers.engine.model.transformer import LoadedModel
from workers.engine.request import EngineRequest, SamplingParams

NUM_TOKENS = 20
NUM_PROMPT_TOKENS = (20, 120)  # at least, at most


def run(context: Context, record: Recorder) -> None:
    models = ["embedded"] if context.is_rehearsal else ["synthetic:small", "embedded"]
    for model in models:
        for dtype in ("bf16",) if context.is_rehearsal else ("bf16", "fp16"):  # a CPU computes no fp16
            record.measure(f"{short(model)} {dtype}", partial(_measure, context, model, dtype))


def run_plain(context: Context, record: Recorder) -> None:
    """Plain torch, which serves where the Triton kernels do not."""
    model = context.model
    record.measure(f"{short(model)} bf16", partial(_measure, context, model, "bf16", _Plain()))
    num_rows = 3 if context.is_rehearsal else 48
    steps = DecodeSteps(subject(model), context.device, context.dtype, num_rows, "torch")
    for rows in (3, num_rows):
        record.measure(step_key(model, rows, NUM_TOKENS), partial(_time, context, steps, rows))


def _time(context: Context, steps: DecodeSteps, num_rows: int) -> dict[str, Any]:
    times = steps.time(num_rows, NUM_TOKENS, context.warm_up_s, context.num_replays)
    return {"step_us": round(1e3 * median(times), 2)}


class _Plain(RunnerFactory):
    def make(self, loaded: LoadedModel, config: EngineConfig, interrupt: Interrupt) -> Runner:
        return CudaRunner(loaded, config.max_batch, config.cache_bytes, PLAIN_KERNELS)


def _measure(context: Context, model: str, dtype: str, runners: RunnerFactory = DEVICE_RUNNERS) -> dict[str, Any]:
    num_crowd, num_alone = (6, 3) if context.is_rehearsal else (48, 24)
    rng = random.Random(0)
    vocab_size = subject(model).vocab_size
    sampled, greedy = SamplingParams(NUM_TOKENS, 0.8, 50, 0.95), SamplingParams(NUM_TOKENS, temperature=0)
    requests = [
        EngineRequest(
            tuple(rng.randrange(256, vocab_size - 1) for _ in range(rng.randint(*NUM_PROMPT_TOKENS))),
            greedy if seed % 4 == 3 else sampled,
            seed,
        )
        for seed in range(num_crowd)
    ]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # of the engine before: an engine takes a share of what is free
    process = EngineAlone(subject(model), context.device, dtype, num_crowd, None, runners)
    try:
        # The crowd has its second run last: the difference between two equal runs is noise of another kind.
        crowd = results(process.engine, requests)
        alone = [results(process.engine, [request])[0] for request in requests[:num_alone]]
        again = results(process.engine, requests)
    finally:
        process.engine.stop(0)
    equal = [ours.token_ids == theirs.token_ids for ours, theirs in zip(alone, crowd, strict=False)]
    repeated = [ours.token_ids == theirs.token_ids for ours, theirs in zip(crowd, again, strict=True)]
    return {
        "share_equal": round(sum(equal) / len(equal), 4),
        "num_texts": len(equal),
        "num_in_crowd": num_crowd,
        "share_equal_of_two_crowds": round(sum(repeated) / len(repeated), 4),
    }
