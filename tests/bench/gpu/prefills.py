"""Stage `prefill`: a prefill program of eight segments, at each length of context."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch

from tests.bench.gpu.context import Context, subject
from tests.bench.gpu.record import Recorder
from tests.bench.gpu.steps import time_replays
from tests.bench.speed.engine_alone import load
from workers.engine.cuda.graphs import NUM_TOKENS, GraphRecorder, PrefillProgram, length_buckets
from workers.engine.cuda.kv_cache import KVCache

MAX_SEQUENCES = 8


@torch.inference_mode()
def run(context: Context, record: Recorder) -> None:
    for model in context.models:
        loaded = load(subject(model), context.device, context.dtype)
        dtype = loaded.model.token_embedding.dtype
        cache = KVCache(loaded.config, MAX_SEQUENCES, dtype, torch.device(context.device))
        program = PrefillProgram(loaded.model, cache)
        if context.is_cuda:
            program.capture(GraphRecorder())
        for length in length_buckets(loaded.config.n_positions):
            name = f"{model.removeprefix('synthetic:')} length={length}"
            record.measure(name, partial(_measure, context, program, length))


@torch.inference_mode()
def _measure(context: Context, program: PrefillProgram, length: int) -> dict[str, Any]:
    times = time_replays(partial(program, length), context.is_cuda, 0.1 * context.warm_up_s, context.num_replays)
    return {"program_us": round(1e3 * median(times), 1), "tokens": NUM_TOKENS, "length": length}
