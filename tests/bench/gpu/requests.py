"""Stages `request` and `compiled`: one whole request through the gateway, in turns with transformers' `generate`.

Each row has one baseline, so that a baseline that hangs costs its own row only.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console

from deploy.load.clients import LOOPBACK, raise_for_status
from deploy.load.prompts import PromptGenerator
from tests.bench.gpu.context import Context
from tests.bench.gpu.record import Recorder, Skipped
from tests.bench.rounds import Contender, interleave
from tests.bench.run import Options
from tests.bench.speed.contenders import BASELINES, Contenders

NUM_GATEWAY_REQUESTS = 5  # per round
# An idle GPU lowers its clocks, and a writer pauses.
PAUSE_S, NUM_PAUSES = 2.0, 6
console = Console(file=sys.stderr, width=120)


def run(context: Context, record: Recorder) -> None:
    record.measure("gateway and a-bf16", lambda: compare(context, "a-bf16"))


def run_compiled(context: Context, record: Recorder) -> None:
    for baseline in ("static", "b-bf16", "continuous"):
        record.measure(f"gateway and {baseline}", partial(_compare_compiled, context, baseline))


def _compare_compiled(context: Context, baseline: str) -> dict[str, Any]:
    if context.is_rehearsal:
        raise Skipped("a rehearsal does not compile: on two cores that takes minutes")
    return compare(context, baseline)


def compare(context: Context, baseline: str) -> dict[str, Any]:
    """Medians of the gateway and of a baseline in interleaved rounds, and their ratio.

    Raises:
        RuntimeError: one of them failed.
    """
    measured = options(context, context.model)
    prompts = PromptGenerator(measured.subject(), measured.seed)
    with Contenders(measured, console) as contenders:
        server = contenders.start_server(measured.models)
        clients = contenders.start_clients((LOOPBACK, server.port), measured.subject(), prompts.seed())

        def measure_gateway() -> dict[str, list[float]]:
            replies = raise_for_status(clients.call("send_new", NUM_GATEWAY_REQUESTS))
            return {
                "gateway": [reply.wall_ms for reply in replies],
                "overhead": [reply.overhead_ms for reply in replies],
            }

        def send_after_a_pause() -> float:
            time.sleep(PAUSE_S)
            (reply,) = raise_for_status(clients.call("send_new", 1))
            return float(reply.wall_ms)

        [theirs] = contenders.start_baselines([baseline], measured.subject(), prompts)
        turns = [theirs, Contender("gateway", "gateway", measure_gateway)]
        results = interleave(turns, measured.num_rounds, console)
        paused = [send_after_a_pause() for _ in range(1 if context.is_rehearsal else NUM_PAUSES)]
        slots = server.slots()
    if results.failures:
        raise RuntimeError("; ".join(f"{name} failed: {why}" for name, why in results.failures.items()))
    ours, other = median(results.samples["gateway"]), median(results.samples[baseline])
    return {
        "baseline": BASELINES[baseline],
        "baseline_ms": round(other, 3),
        "gateway_ms": round(ours, 3),
        "speedup": round(other / ours, 2),
        "overhead_ms": round(median(results.samples["overhead"]), 3),
        "after_pause_ms": round(median(paused), 3),
        "samples_after_pause_ms": [round(value, 3) for value in paused],
        "samples_ms": {name: [round(value, 3) for value in values] for name, values in results.samples.items()},
        "slots": slots,
    }


def options(context: Context, models: str) -> Options:
    """
    Args:
        models: a value of `TERCET_MODELS`.
    """
    device, settings = ("cpu", {"dtype": "fp32"}) if context.is_rehearsal else ("cuda", {})
    return Options(
        models=models,
        device=device,
        num_rounds=1 if context.is_rehearsal else 7,
        is_quick=context.is_rehearsal,
        settings=settings,
    )
