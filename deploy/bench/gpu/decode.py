"""Stage `decode`: the decode step at several numbers of rows and lengths of context, beside its floor and its estimate.

The floor is what a step must read, weights and keys and values, divided by the bandwidth measured on this machine.
"""

from __future__ import annotations

from functools import partial
from statistics import median, quantiles
from typing import Any

from deploy.bench.gpu.context import Context, subject
from deploy.bench.gpu.estimate import step_estimate
from deploy.bench.gpu.machine import measured_gb_s
from deploy.bench.gpu.record import Recorder
from deploy.bench.gpu.stages import step_key
from deploy.bench.speed.steps import DecodeSteps

TENTHS = 10


def run(context: Context, record: Recorder) -> None:
    gb_s = measured_gb_s(context)
    for model in context.models:
        _measure_model(model, context, record, gb_s)


def _measure_model(model: str, context: Context, record: Recorder, gb_s: float) -> None:
    wanted = [(rows, tokens) for rows in context.row_counts for tokens in context.context_lengths]
    if all(step_key(model, *point) in record.result.rows for point in wanted):
        return
    try:
        steps = DecodeSteps(subject(model), context.device, context.dtype, max(context.row_counts), context.kernels)
    except Exception as error:  # noqa: BLE001 - the other model may fit
        record.fail(model, error)
        return
    for rows, tokens in wanted:
        record.measure(step_key(model, rows, tokens), partial(_measure, steps, rows, tokens, context, gb_s))


def _measure(steps: DecodeSteps, num_rows: int, num_tokens: int, context: Context, gb_s: float) -> dict[str, Any]:
    times = steps.time(num_rows, num_tokens, context.warm_up_s, context.num_replays)
    paper = step_estimate(steps.loaded.config, num_rows, num_tokens, gb_s)
    step_us, floor_us = 1e3 * median(times), paper.read_us
    return {
        "rows": num_rows,
        "context": num_tokens,
        "step_us": round(step_us, 2),
        "p10_us": round(1e3 * quantiles(times, n=TENTHS)[0], 2),
        "p90_us": round(1e3 * quantiles(times, n=TENTHS)[-1], 2),
        "floor_us": round(floor_us, 2),
        "times_floor": round(step_us / floor_us, 3),
        "estimate_us": [round(paper.least_us, 1), round(paper.most_us, 1)],
        "read_bytes": paper.weight_bytes + paper.kv_bytes,
        "achieved_gb_s": round((paper.weight_bytes + paper.kv_bytes) / step_us / 1e3, 1),
        "tokens_per_s": round(1e6 * num_rows / step_us),
        "num_replays": len(times),
        "kernels": steps.kernels,
    }
