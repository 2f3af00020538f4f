"""The memory that is free here, and how much of it the KV caches of CPU workers may take. Knows no models."""

from __future__ import annotations

import os
from pathlib import Path

# Share of the free memory; weights and the other processes of the machine need memory, too.
MEMORY_SHARE = 0.3


def cache_budget_bytes(num_workers: int = 1) -> int:
    """What each of `num_workers` may take: together MEMORY_SHARE of the free memory; raises as `free_bytes`."""
    return int(MEMORY_SHARE * free_bytes() / num_workers)


def free_bytes(root: Path = Path("/")) -> int:
    """The memory that is available, on the machine and in this process's cgroup; on macOS half of the machine's.

    Args:
        root: directory under which /proc and /sys are read.

    Raises:
        OSError: if /proc/meminfo does not say.
    """
    free = [_meminfo_available(root / "proc/meminfo")]
    group = root / "sys/fs/cgroup"
    try:
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or "max": no limit
        pass
    return max(0, min(free))


def _meminfo_available(meminfo: Path) -> int:
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
