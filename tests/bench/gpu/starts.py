"""Stages `faults`, `memory` and `cold`: the successor of a worker that has died, a worker with little memory, and the
time from `tercet serve` to a warm worker.

Each row has one worker, of a server of its own or of its stage. What a worker computes is measured elsewhere.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch

from deploy.tuning.load.clients import LOOPBACK, Clients
from deploy.tuning.load.workload import W
from deploy.tuning.planning import make_plan
from shared.errors import StartError
from tests.bench.gpu.context import Context, subject
from tests.bench.gpu.record import Recorder, Skipped
from tests.bench.gpu.requests import options
from tests.bench.rounds import raise_for_status
from tests.bench.server import MeasuredServer, start_server
from tests.faulty_workers import fault_environment

FAULTY_SEED = 901
SHARES = (1.05, 0.9)  # of the memory that the plan gives to a worker
LACKS_MEMORY = "lower TERCET_MAX_BATCH"  # in what `KVCache` and `foreign_errors.load_failure` say


def run_faults(context: Context, record: Recorder) -> None:
    fault = "device" if context.is_rehearsal else "assert"
    os.environ |= fault_environment({"test_faults": f"{FAULTY_SEED}={fault}"})
    with _serving(context) as server:
        clients = _clients(context, server)
        ends: dict[str, Callable[[int], object]] = {
            "killed": lambda pid: os.kill(pid, signal.SIGKILL),
            "device error": lambda _: clients.send([W.body("The sea", FAULTY_SEED)]),
        }
        for name, end in ends.items():
            record.measure(name, partial(_recover, server, clients, end))


def _recover(server: MeasuredServer, clients: Clients, end: Callable[[int], object]) -> dict[str, Any]:
    """Seconds from the end of a worker until its successor is warm, and until that has answered."""
    began = time.monotonic()
    worker_s = server.renew_worker(end)
    warm_s = time.monotonic() - began
    raise_for_status(clients.send_new(1))
    answered_s = time.monotonic() - began
    return {"warm_s": round(warm_s, 2), "answered_s": round(answered_s, 2), "start_of_worker_s": round(worker_s, 2)}


def run_memory(context: Context, record: Recorder) -> None:
    for share in SHARES:
        record.measure(f"{share:g} × plan", partial(_start_with, share, context))


class _WatchedServer(MeasuredServer):
    """Reads the GPU's free memory whenever the slots are read: every 10 ms while it starts."""

    least_free_bytes = 1 << 62

    def slots(self) -> list[dict[str, Any]]:
        self.least_free_bytes = min(self.least_free_bytes, torch.cuda.mem_get_info()[0])
        return super().slots()


def _start_with(share: float, context: Context) -> dict[str, Any]:
    """Start a worker on a GPU of which this process leaves `share` of what the plan gives to the worker.

    Raises:
        StartError: the worker does not answer though it has the memory, or does not say that it lacks.
    """
    measured = options(context, context.model)
    with TemporaryDirectory() as directory:
        settings = options(context, context.model, run_dir=directory).load_settings()
        [slot] = make_plan(settings, os.environ).slots
    if slot.memory is None:
        raise Skipped("the plan gives no memory of a GPU to a worker on the CPU")
    torch.cuda.empty_cache()  # of an earlier row
    allowed = int(share * slot.memory.total_bytes)
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - allowed, dtype=torch.uint8, device=context.device)
    free_bytes = torch.cuda.mem_get_info()[0]
    server = _WatchedServer(measured.models, measured.server_settings)
    found = {"state": "warm"}
    try:
        with server:
            raise_for_status(_clients(context, server).send_new(1))
            server.slots()
    except StartError as error:
        reason = str(error).partition("\n")[0]  # without the server's log
        if share > 1 or LACKS_MEMORY not in reason:
            raise
        found = {"state": "failed", "reason": reason}
    return found | {
        "plan_mib": slot.memory.total_bytes >> 20,
        "free_mib": free_bytes >> 20,
        "ballast_mib": ballast.nbytes >> 20,
        "peak_mib": (free_bytes - server.least_free_bytes) >> 20,
    }


def run_cold(context: Context, record: Recorder) -> None:
    record.measure("serve", partial(_start_twice, context))


def _start_twice(context: Context) -> dict[str, Any]:
    """Seconds from exec to warm: without compiled kernels, and with those of the first start."""
    found = {}
    with TemporaryDirectory() as cache:
        for name in ("first", "second"):
            began = time.monotonic()
            with _serving(context, cache_dir=cache) as server:
                found[f"{name}_s"] = round(time.monotonic() - began, 2)
                found[f"{name}_start_of_worker_s"] = round(server.first_start_s, 2)
    return found


def _serving(context: Context, **settings: str) -> AbstractContextManager[MeasuredServer]:
    measured = options(context, context.model, **settings)
    return start_server(measured.models, measured.server_settings)


def _clients(context: Context, server: MeasuredServer) -> Clients:
    return Clients(LOOPBACK, server.port, subject(context.model), W, 0)
