"""Stage `profile`: the kernels of a replay, their number and their time, by torch's profiler."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.bench.gpu.context import Context, short, subject
from tests.bench.gpu.record import Recorder, Skipped
from tests.bench.gpu.steps import DecodeSteps

NUM_TOKENS = 150
NUM_SLOWEST = 12
MAX_NAME_CHARS = 90


def run(context: Context, record: Recorder) -> None:
    for model in context.models:
        steps = DecodeSteps(subject(model), context.device, context.dtype, max(context.row_counts), context.kernels)
        for rows in sorted(context.row_counts):
            record.measure(f"{short(model)} rows={rows}", partial(_profile, steps, rows, context))
        del steps


@torch.inference_mode()
def _profile(steps: DecodeSteps, num_rows: int, context: Context) -> dict[str, Any]:
    replay = steps.replay(num_rows, NUM_TOKENS)
    num_replays = 2 if context.is_rehearsal else 20
    activity = ProfilerActivity.CPU if context.is_rehearsal else ProfilerActivity.CUDA
    replay()
    with profile(activities=[activity]) as result:
        for _ in range(num_replays):
            replay()
        if context.is_cuda:
            torch.cuda.synchronize()
    time = "self_cpu_time_total" if context.is_rehearsal else "self_device_time_total"
    counts: Counter[str] = Counter()
    times_us: Counter[str] = Counter()
    for event in result.events():
        if context.is_rehearsal or str(event.device_type).endswith("CUDA"):
            counts[event.name] += 1
            times_us[event.name] += getattr(event, time)
    if not counts:
        raise Skipped("the profiler reported no kernels: CUPTI may not be usable on this machine")
    return {
        "kernels_per_replay": round(counts.total() / num_replays, 2),
        "us_per_replay": round(times_us.total() / num_replays, 2),
        "counts": "operations of the CPU" if context.is_rehearsal else "kernels",
        "slowest": [
            {
                "name": name[:MAX_NAME_CHARS],
                "per_replay": round(counts[name] / num_replays, 2),
                "us_per_replay": round(us / num_replays, 2),
            }
            for name, us in times_us.most_common(NUM_SLOWEST)
        ],
    }
