"""Stages `decode`, the decode step at several numbers of rows and lengths of context, with its floor, and `prefill`, a
prefill program of eight segments at each length of context.

The floor is what a step must read, weights and keys and values, divided by the bandwidth measured on this machine.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from statistics import median, quantiles
from typing import Any

import torch

from tests.bench.gpu.context import Context, short, subject
from tests.bench.gpu.machine import measured_gb_s
from tests.bench.gpu.record import Recorder
from tests.bench.gpu.stages import step_key
from tests.bench.gpu.steps import DecodeSteps, time_replays
from tests.bench.speed.engine_alone import load
from workers.engine.cuda.graphs import NUM_TOKENS, GraphRecorder, PrefillProgram, length_buckets
from workers.engine.cuda.kv_cache import KVCache
from workers.engine.model.config import ModelConfig
from workers.engine.model.linear import HEAD_ROWS_MULTIPLE

BYTES_PER_VALUE = 2  # bf16, or fp16 where the card has no bf16
MAX_SEQUENCES = 8  # of the KV cache of a prefill


def step_bytes(config: ModelConfig, num_rows: int, num_tokens: int) -> int:
    """Bytes that a decode step of `num_rows` different prompts of `num_tokens` tokens reads.

    The weights of the linear layers, the head with its padded vocabulary, and the keys and values.
    """
    padding = -config.vocab_size % HEAD_ROWS_MULTIPLE * config.n_embd
    num_kv_values = 2 * config.n_layer * config.kv_width * num_rows * num_tokens
    return BYTES_PER_VALUE * (config.num_weights_read + padding + num_kv_values)


def run(context: Context, record: Recorder) -> None:
    gb_s = measured_gb_s(context)
    for model in context.models:
        steps = DecodeSteps(subject(model), context.device, context.dtype, max(context.row_counts), context.kernels)
        for rows, tokens in product(context.row_counts, context.context_lengths):
            record.measure(step_key(model, rows, tokens), partial(_measure, steps, rows, tokens, context, gb_s))
        del steps


def _measure(steps: DecodeSteps, num_rows: int, num_tokens: int, context: Context, gb_s: float) -> dict[str, Any]:
    times = steps.time(num_rows, num_tokens, context.warm_up_s, context.num_replays)
    read_bytes = step_bytes(steps.loaded.config, num_rows, num_tokens)
    step_us, floor_us = 1e3 * median(times), read_bytes / gb_s / 1e3
    return {
        "step_us": round(step_us, 2),
        "p10_us": round(1e3 * quantiles(times, n=10)[0], 2),
        "p90_us": round(1e3 * quantiles(times, n=10)[-1], 2),
        "floor_us": round(floor_us, 2),
        "times_floor": round(step_us / floor_us, 3),
        "achieved_gb_s": round(read_bytes / step_us / 1e3, 1),
        "tokens_per_s": round(1e6 * num_rows / step_us),
        "kernels": steps.kernels,
    }


@torch.inference_mode()
def run_prefill(context: Context, record: Recorder) -> None:
    for model in context.models:
        loaded = load(subject(model), context.device, context.dtype)
        dtype = loaded.model.token_embedding.dtype
        cache = KVCache(loaded.config, MAX_SEQUENCES, dtype, torch.device(context.device))
        program = PrefillProgram(loaded.model, cache)
        if context.is_cuda:
            program.capture(GraphRecorder())
        for length in length_buckets(loaded.config.n_positions):
            name = f"{short(model)} length={length}"
            record.measure(name, partial(_measure_prefill, context, program, length))


@torch.inference_mode()
def _measure_prefill(context: Context, program: PrefillProgram, length: int) -> dict[str, Any]:
    times = time_replays(partial(program, length), context.is_cuda, 0.1 * context.warm_up_s, context.num_replays)
    return {"program_us": round(1e3 * median(times), 1), "tokens": NUM_TOKENS, "length": length}
