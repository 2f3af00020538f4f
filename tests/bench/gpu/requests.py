"""Requests through the gateway: one at a time in turns with transformers' `generate` (stages `request` and `compiled`),
and from many clients to one worker on the GPU and to two (stage `workers`), which may share it by MPS (stage `mps`).

A row of the first two has one baseline, so that a baseline that hangs costs its own row only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import suppress
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from deploy.tuning.gpus import has_mps
from deploy.tuning.load.clients import LOOPBACK
from deploy.tuning.load.workload import PromptGenerator
from tests.bench.contender_process import ContenderProcess
from tests.bench.gpu.context import Context, subject
from tests.bench.gpu.record import Recorder, Skipped
from tests.bench.rounds import Contender, interleave, raise_for_status
from tests.bench.run import Options
from tests.bench.server import MeasuredServer
from tests.bench.speed.contenders import BASELINES, Contenders

NUM_GATEWAY_REQUESTS = 5  # per round
# An idle GPU lowers its clocks, and a writer pauses.
PAUSE_S, NUM_PAUSES = 2.0, 6
NUM_CLIENTS, SECONDS = 48, 8.0  # of stage `workers`
MPS_CONTROL, MPS_STOP_S = "nvidia-cuda-mps-control", 5.0


def run(context: Context, record: Recorder) -> None:
    record.measure("gateway and a-bf16", partial(compare, context, "a-bf16"))


def run_compiled(context: Context, record: Recorder) -> None:
    for baseline in ("static", "b-bf16"):
        record.measure(f"gateway and {baseline}", partial(compare, context, baseline))


def compare(context: Context, baseline: str) -> dict[str, Any]:
    """Medians of the gateway and of a baseline in interleaved rounds, and their ratio.

    Raises:
        RuntimeError: one of them failed.
    """
    if context.is_rehearsal and baseline != "a-bf16":
        raise Skipped("a rehearsal does not compile: on two cores that takes minutes")
    measured = options(context, context.model)
    prompts = PromptGenerator(subject(context.model), measured.seed)
    with Contenders(measured) as contenders:
        server, clients = _start(contenders, measured, context, prompts)

        def measure_gateway() -> dict[str, list[float]]:
            replies = raise_for_status(clients.call("send_new", NUM_GATEWAY_REQUESTS))
            return {
                "gateway": [reply.wall_ms for reply in replies],
                "overhead": [reply.wall_ms - reply.engine_ms for reply in replies],
            }

        def send_after_a_pause() -> float:
            time.sleep(PAUSE_S)
            (reply,) = raise_for_status(clients.call("send_new", 1))
            return float(reply.wall_ms)

        [theirs] = contenders.start_baselines([baseline], subject(context.model), prompts)
        turns = [theirs, Contender("gateway", "gateway", measure_gateway)]
        results = interleave(turns, measured.num_rounds)
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


def run_workers(context: Context, record: Recorder) -> None:
    for count in (1, 2):
        record.measure(f"{count} per GPU", partial(_count_answers, context, count))


def _count_answers(context: Context, num_workers: int) -> dict[str, Any]:
    measured = options(context, f"{context.model}*{num_workers}")
    num_clients, seconds = (4, 1) if context.is_rehearsal else (NUM_CLIENTS, SECONDS)
    with Contenders(measured) as contenders:
        _, clients = _start(contenders, measured, context, PromptGenerator(subject(context.model), 0))
        load = clients.call("send_for", num_clients, seconds)
    replies = raise_for_status(load.replies)
    return {
        "answers_per_s": round(len(replies) / load.elapsed_s, 1),
        "p50_ms": round(median(reply.wall_ms for reply in replies), 1),
        "client_cpu_s": round(load.client_cpu_s, 2),
        "has_mps": has_mps(os.environ),
    }


def run_mps(context: Context, record: Recorder) -> None:
    record.measure("2 per GPU", partial(_count_answers_with_mps, context))


def _count_answers_with_mps(context: Context) -> dict[str, Any]:
    """Two workers, with an MPS service of their own."""
    if shutil.which(MPS_CONTROL) is None:
        raise Skipped(f"{MPS_CONTROL} is not on this machine")
    with TemporaryDirectory() as directory:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
        # In the foreground: in this stage's process group, which is killed at its end.
        with subprocess.Popen([MPS_CONTROL, "-f"], stdin=subprocess.DEVNULL) as service:
            try:
                return _count_answers(context, 2)
            finally:
                with suppress(subprocess.TimeoutExpired):
                    subprocess.run([MPS_CONTROL], input=b"quit\n", timeout=MPS_STOP_S, check=False)
                service.terminate()


def _start(
    contenders: Contenders, measured: Options, context: Context, prompts: PromptGenerator
) -> tuple[MeasuredServer, ContenderProcess]:
    """The server under test and its clients."""
    server = contenders.start_server(measured.models)
    return server, contenders.start_clients((LOOPBACK, server.port), subject(context.model), prompts.seed())


def options(context: Context, models: str, **settings: str) -> Options:
    """
    Args:
        models: a value of `TERCET_MODELS`.
        settings: further settings of the server.
    """
    device = "cuda"
    if context.is_rehearsal:
        device, settings = "cpu", {"dtype": "fp32", **settings}
    return Options(
        models=models,
        device=device,
        num_rounds=1 if context.is_rehearsal else 7,
        is_quick=context.is_rehearsal,
        settings=settings,
    )
