"""Stage `mps`: two workers of one model on one GPU, without and with NVIDIA's Multi-Process Service.

The daemon has directories of its own and is stopped at the end: no setting of the GPU changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deploy.bench.gpu.context import Context, subject
from deploy.bench.gpu.crowded import process_memory_mib
from deploy.bench.gpu.record import Recorder, Skipped
from deploy.load.clients import LOOPBACK, Clients, raise_for_status
from deploy.load.rounds import percentile
from deploy.load.server import Server
from deploy.load.workload import W

CONTROL = "nvidia-cuda-mps-control"
NUM_CLIENTS, NUM_REQUESTS = 16, 12


def run(context: Context, record: Recorder) -> None:
    record.measure("one worker", lambda: _measure(context, 1))
    record.measure("two workers", lambda: _measure(context, 2))
    record.measure("two workers, MPS", lambda: _with_mps(context))


def _with_mps(context: Context) -> dict[str, Any]:
    if context.is_rehearsal:
        raise Skipped("a rehearsal has no GPU")
    if shutil.which(CONTROL) is None:
        raise Skipped(f"{CONTROL} is not on the PATH")
    with _daemon():
        return _measure(context, 2)


def _measure(context: Context, num_workers: int) -> dict[str, Any]:
    num_clients, num_requests = (2, 2) if context.is_rehearsal else (NUM_CLIENTS, NUM_REQUESTS)
    with Server(f"{context.model}*{num_workers}", {"devices": context.server_device}) as server:
        clients = Clients(LOOPBACK, server.port, subject(context.model), W, 0, {})
        raise_for_status(clients.send_concurrently(num_clients, 1).replies)
        load = clients.send_concurrently(num_clients, num_requests)
        replies = raise_for_status(load.replies)
        memory = process_memory_mib()
    times = [reply.wall_ms for reply in replies]
    return {
        "clients": num_clients,
        "p50_ms": round(percentile(times, 0.5), 2),
        "p99_ms": round(percentile(times, 0.99), 2),
        "requests_per_s": round(len(replies) / load.elapsed_s, 1),
        "memory_mib": memory,
    }


@contextmanager
def _daemon() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tercet-mps-") as directory:
        names = {"CUDA_MPS_PIPE_DIRECTORY": f"{directory}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{directory}/log"}
        for path in names.values():
            os.makedirs(path)
        os.environ.update(names)  # the servers inherit them
        try:
            started = subprocess.run([CONTROL, "-d"], capture_output=True, text=True, timeout=20, check=False)
            if started.returncode:
                raise Skipped(f"{CONTROL} ended with {started.returncode}: {started.stderr.strip()[:200]}")
            yield
        finally:
            subprocess.run([CONTROL], input="quit\n", capture_output=True, text=True, timeout=20, check=False)
            for name in names:
                os.environ.pop(name, None)
