"""`cost --memory`: the proportional set size (PSS) of each process of a server, at rest and after requests.

A page that n processes map counts 1/n in each, so the sum over the processes is what the instance takes. Source:
`smaps_rollup` in proc_pid_smaps(5). Works with other checkouts: only `tercet serve` and `POST /autocomplete` are used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from deploy.tuning.load.clients import LOOPBACK, Clients
from deploy.tuning.load.workload import W
from shared.process import proportional_set_size
from shared.settings import Settings
from tests.bench.results import Row
from tests.bench.rounds import raise_for_status
from tests.bench.server import MeasuredServer, pool_of
from workers.checkpoints.resolve import resolve

REST_S = 2.0  # after the last slot is warm, and after the last request


def measure_memory(models: str, settings: Mapping[str, str], num_requests: int, root: Path, seed: int) -> list[Row]:
    """Start a server, and read its memory in MB (10⁶ bytes) before and after requests of the workload W with new
    prompts. Anonymous is the part that no file backs. The last row is the sum.

    Args:
        models: as in TERCET_MODELS; they get equally many requests.
        root: the checkout to serve.

    Raises:
        StartError: it does not get warm, or a request failed.
    """
    specs = Settings.load({"TERCET_MODELS": models}).model.models
    with MeasuredServer(models, {"devices": "cpu", **settings}, root) as server:
        time.sleep(REST_S)
        pids = _names(server)
        before = {pid: (_pss_mb(pid), proportional_set_size(pid, "Pss_Anon") / 1e6) for pid in pids}
        for spec in specs:
            subject = resolve(spec.name, spec.source)
            more = {"model_size": spec.name} if len(specs) > 1 else {}
            clients = Clients(LOOPBACK, server.port, subject, W, seed, **more)
            raise_for_status(clients.send_new(num_requests // len(specs)))
        time.sleep(REST_S)
        figures = [(*before[pid], _pss_mb(pid)) for pid in pids]
    headings = "at rest, MB", "of it anonymous", f"after {num_requests} requests"
    named = zip((*pids.values(), "all"), (*figures, tuple(map(sum, zip(*figures, strict=True)))), strict=True)
    return [{"process": name, **dict(zip(headings, own, strict=True))} for name, own in named]


def _pss_mb(pid: int) -> float:
    return proportional_set_size(pid) / 1e6


def _names(server: MeasuredServer) -> dict[int, str]:
    """The server's processes, with what each is for."""
    slots = {slot["pid"]: f"worker: {slot.get('model', 'slot')}" for slot in server.slots()}
    names = {}
    for pid, parent in server.processes().items():
        role = pool_of(pid)
        master = "master of the workers" if role == "workers" else "master of the gateway"
        own = slots.get(pid) or (master if parent == server.pid else role)
        names[pid] = "supervisor" if pid == server.pid else own
    return names
