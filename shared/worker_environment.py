"""Environment variables of a worker process: its GPU, its compute threads, and where Triton caches kernels.

They take effect only if set before torch and OpenMP are loaded. This module knows the plan and the settings, and calls
no CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shared.cpu_features import num_cores
from shared.home import home_directory
from shared.plan import Plan, Slot
from shared.settings import Settings
from shared.visible_gpus import visible_gpus

# Polls of an OpenMP thread at a barrier before it sleeps (GOMP_SPINCOUNT). By default it spins for milliseconds; where
# other processes compete for the cores, the threads then wait for each other's time slices. Three branches of 20 tokens
# (GPT-2 small's shape, two cores, medians of three interleaved rounds): with two busy loops on the same cores 746 ms by
# default and 510 ms with this value, on an idle machine 212 and 216 ms.
SPIN_COUNT = "20000"
# A model with smaller weights computes on one thread and leaves the other cores to the HTTP threads. The embedded
# checkpoint through the gateway, a request every 0.2 s on two cores, medians of three interleaved rounds: 42 ms with
# one thread (p90 45 ms), 49 ms with two (p90 74 ms).
SINGLE_THREAD_WEIGHT_BYTES = 64 << 20


def worker_environment(slot: Slot, plan: Plan, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set in the worker of `slot`, given the master's `environ`.

    A `CUDA_VISIBLE_DEVICES` that is already set (Slurm, Kubernetes, UUIDs, MIG) is indexed into: `cuda:1` is its second
    entry. The cores of the process are divided among the plan's workers, because two workers with two threads each are
    slower on two cores than with one each.
    """
    if slot.device == "cpu":
        visible = ""
    else:
        index = int(slot.device.partition(":")[2])
        entries = visible_gpus(environ) or []
        visible = entries[index] if index < len(entries) else str(index)
    num_threads = settings.pool.cpu_threads or max(1, num_cores() // len(plan.slots))
    if not settings.pool.cpu_threads and plan.model(slot.model).weight_bytes < SINGLE_THREAD_WEIGHT_BYTES:
        num_threads = 1
    caches = {}
    if settings.server.cache_dir is not None:  # Triton reads it when it is imported
        caches = {"TRITON_CACHE_DIR": str(settings.server.cache_dir / "triton")}
    return {
        **caches,
        # The order of nvidia-smi, by which GPUs are planned; CUDA's own puts the fastest first.
        "CUDA_DEVICE_ORDER": environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "CUDA_VISIBLE_DEVICES": visible,
        "OMP_NUM_THREADS": str(num_threads),
        "GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", SPIN_COUNT),
        "TERCET_SLOT": str(slot.index),
    }


def cache_directory(settings: Settings) -> Path | None:
    """Where results of checks are kept from start to start; None without a home directory."""
    if settings.server.cache_dir is not None:
        return settings.server.cache_dir
    home = home_directory()
    return None if home is None else home / ".cache" / "tercet"
