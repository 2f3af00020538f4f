"""Stage `workers`: four workers of one GPU started at once with its memory nearly full, and a reload of all.

Memory is taken by this process first, so that what is left is what a small card has.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from functools import partial
from typing import Any

import torch

from deploy.bench.gpu.context import Context, subject
from deploy.bench.gpu.record import Recorder
from deploy.load.clients import LOOPBACK, Clients, raise_for_status
from deploy.load.server import Server
from deploy.load.workload import W
from shared.errors import StartError

NUM_WORKERS = 4
# Of the GPU's memory, what is free: the plan gives workers and their successors 0.8 of it. With less they must be
# refused with a reason, not crash one another.
LEFT_SHARES = (0.85, 0.5)
NUM_REQUESTS = 6


def run(context: Context, record: Recorder) -> None:
    for left in LEFT_SHARES[: 1 if context.is_rehearsal else None]:
        record.measure(f"{left:.0%} of the memory free", partial(_start_and_reload, context, left))


def _start_and_reload(context: Context, left: float) -> dict[str, Any]:
    model = "embedded" if context.is_rehearsal else "synthetic:small"
    hog = None if context.is_rehearsal else _take_memory(context.device, left)
    start = time.monotonic()
    try:
        num_workers = 2 if context.is_rehearsal else NUM_WORKERS
        with Server(f"{model}*{num_workers}", {"devices": context.server_device}) as server:
            started_s = time.monotonic() - start
            clients = Clients(LOOPBACK, server.port, subject(model), W, 0, {})
            raise_for_status(clients.send_new(NUM_REQUESTS))
            memory = process_memory_mib()
            start = time.monotonic()
            server.reload()
            reloaded_s = time.monotonic() - start
            raise_for_status(clients.send_new(NUM_REQUESTS))
            after = process_memory_mib()
            slots = server.slots()
    except StartError as error:
        return {
            "is_refused": True,
            "reason": str(error).partition("\n")[0],
            "elapsed_s": round(time.monotonic() - start, 1),
        }
    finally:
        del hog
        if not context.is_rehearsal:
            torch.cuda.empty_cache()
    return {
        "workers": num_workers,
        "is_refused": False,
        "all_warm_after_s": round(started_s, 1),
        "reloaded_after_s": round(reloaded_s, 1),
        "memory_mib": memory,
        "memory_after_reload_mib": after,
        "slots": [{name: slot.get(name) for name in ("state", "kernels", "max_batch")} for slot in slots],
    }


def _take_memory(device: str, left: float) -> torch.Tensor:
    """Memory of the GPU, so much that a share of `left` of all is free."""
    free, total = torch.cuda.mem_get_info()
    return torch.empty(max(0, int(free - left * total)), dtype=torch.uint8, device=device)


def process_memory_mib() -> dict[str, int]:
    """GPU memory by process id, as the driver reports it; empty where it does not."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    rows = [line.split(",") for line in done.stdout.strip().splitlines() if "," in line]
    return {pid.strip(): int(used) for pid, used in rows if used.strip().isdigit()}
