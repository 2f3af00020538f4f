"""Where a figure comes from: the machine, the versions, the command line. Does not import torch."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

# What decides which matrix kernels a CPU can run, as /proc/cpuinfo names it.
KERNEL_FLAGS = (
    "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8",
)  # fmt: skip
PACKAGES = ("tercet", "torch", "transformers", "tokenizers", "gunicorn", "falcon", "httpx")


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured; see `Clock` for the last field."""

    cpu: str
    cores: int  # that this process may use
    flags: list[str]
    memory_bytes: int
    gpus: list[str]
    system: str
    others_share_of_cores: float = 0.0


class Clock:
    """Time that passes, and who has the cores meanwhile.

    Others' is what all processes (and the hypervisor) took of the cores, minus what this process and its children
    took that have ended and been waited for: read it at the end. A server that was already running counts as others.
    """

    def __init__(self) -> None:
        self.started_at = datetime.now(UTC)
        self._start_s = time.monotonic()
        self._busy_s = _busy_s(Path("/proc/stat").read_text())
        self._own_s = _own_s()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def others_share_of_cores(self) -> float:
        """0 to 1; at least the resolution of the kernel's clock (10 ms)."""
        others_s = _busy_s(Path("/proc/stat").read_text()) - self._busy_s - (_own_s() - self._own_s)
        return max(0.0, others_s / self.elapsed_s() / (os.cpu_count() or 1))


def _busy_s(stat: str) -> float:
    """Seconds that all cores were not idle: user, nice, system, irq, softirq and steal of `man 5 proc_stat`."""
    ticks = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    idle, waiting = ticks[3:5]
    return (sum(ticks) - idle - waiting) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this process and of its children that were waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def describe() -> Machine:
    """This machine, as it is now."""
    cpu, flags = _cpu(Path("/proc/cpuinfo").read_text())
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        flags=flags,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus(),
        system=platform.platform(),
    )


def _cpu(cpuinfo: str) -> tuple[str, list[str]]:
    """Model name and the flags of `KERNEL_FLAGS` that the first processor has."""
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    has = set(fields.get("flags", "").split())
    number = " ".join(fields[name] for name in ("cpu family", "model", "stepping") if name in fields)
    name = fields.get("model name", "unknown")
    return f"{name} (family, model, stepping: {number})", [flag for flag in KERNEL_FLAGS if flag in has]


def gpus() -> list[str]:
    """Names of the GPUs that the driver lists; asked of `nvidia-smi`, so that CUDA is not touched."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def versions() -> dict[str, str]:
    """Python's and the packages' that a figure depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def command_line() -> str:
    """As it was typed, with the program under its own name."""
    return shlex.join(["tercet", *sys.argv[1:]])
