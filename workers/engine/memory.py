"""Memory: what is free here, how much of it a CPU worker's KV cache may take, and the release of what is not used."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

# Of the free memory; other workers on the machine and the rest of this process need memory, too.
MEMORY_SHARE = 0.3


def cache_budget_bytes() -> int:
    """MEMORY_SHARE of the free memory; raises as `free_bytes`."""
    return int(MEMORY_SHARE * free_bytes())


def free_bytes() -> int:
    """The memory that is available, on the machine and in this process's cgroup.

    Raises:
        OSError: if /proc/meminfo does not say.
    """
    free = [_meminfo_available()]
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or "max": no limit
        pass
    return max(0, min(free))


def release_memory() -> None:
    """Frees what only cycles reference (an exception and its frames are one), then the GPU memory that torch keeps."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def device_bytes() -> int:
    """GPU memory that torch's allocator holds in this process; 0 without a GPU."""
    return int(torch.cuda.memory_reserved())


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
