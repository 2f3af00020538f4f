"""Stage `seeds`: whether a seed gives the same text alone and among 48 sequences, in bf16 and fp16.

Matrix products whose order of summation depends on the number of rows change the last bits of logits, and a draw close
to a border then gives another token. The share of equal texts is reported for each dtype and model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tests.bench.gpu.context import Context, subject
from tests.bench.gpu.record import Recorder
from tests.bench.quality.writers import common_length
from tests.bench.speed.engine_alone import EngineAlone
from workers.engine.engine import Engine
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput

NUM_TOKENS = 20
NUM_PROMPT_TOKENS = (20, 120)  # at least, at most


def run(context: Context, record: Recorder) -> None:
    models = ["embedded"] if context.is_rehearsal else ["synthetic:small", "embedded"]
    for model in models:
        for dtype in ("bf16",) if context.is_rehearsal else ("bf16", "fp16"):  # a CPU computes no fp16
            record.measure(
                f"{model.removeprefix('synthetic:')} {dtype}",
                partial(_measure, context, model, dtype),
            )


def _measure(context: Context, model: str, dtype: str) -> dict[str, Any]:
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
    process = EngineAlone(subject(model), context.device, dtype, num_crowd, None)
    try:
        # The crowd has its second run last: the difference between two equal runs is noise of another kind.
        crowd = _run_together(process.engine, requests)
        alone = [_run_together(process.engine, [request])[0] for request in requests[:num_alone]]
        again = _run_together(process.engine, requests)
    finally:
        process.engine.stop(0)
    pairs = list(zip(alone, crowd[:num_alone], strict=True))
    equal = [ours.token_ids == theirs.token_ids for ours, theirs in pairs]
    prefixes = [common_length(ours.token_ids, theirs.token_ids) for ours, theirs in pairs]
    different = [at for at, is_same in zip(prefixes, equal, strict=True) if not is_same]
    repeated = [ours.token_ids == theirs.token_ids for ours, theirs in zip(crowd, again, strict=True)]
    return {
        "share_equal": round(sum(equal) / len(equal), 4),
        "num_texts": len(equal),
        "num_in_crowd": num_crowd,
        "first_difference_at_token": min(different, default=None),
        "share_equal_of_two_crowds": round(sum(repeated) / len(repeated), 4),
    }


def _run_together(engine: Engine, requests: Sequence[EngineRequest]) -> list[SequenceOutput]:
    """The outputs of requests that are submitted at once."""
    return [stream.result() for stream in [engine.submit(request) for request in requests]]
