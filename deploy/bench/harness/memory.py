"""Memory of processes: their share of the machine's memory, and what they hold on GPUs.

Reads /proc and asks NVIDIA's management library (nvidia-ml-py), which calls no CUDA. Does not know what
the processes do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from shared.errors import StartError


def pss_bytes(pids: Iterable[int]) -> int:
    """The proportional set size (PSS) of processes: a page that n processes share counts 1/n for each.

    See "smaps_rollup" in `man 5 proc`. A process that has ended counts nothing.
    """
    return sum(map(_pss_bytes, pids))


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def available_bytes() -> int:
    """Memory that processes can still allocate without swapping ("MemAvailable" in `man 5 proc_meminfo`)."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


class GpuMemory:
    """Memory of the GPUs of this machine.

    In a container whose process ids are not the host's, the driver's list names no process of ours. Then the use of all
    GPUs counts, less what was used when this object was created.
    """

    def __init__(self, library: ModuleType | None = None) -> None:
        """
        Args:
            library: in place of `pynvml`.

        Raises:
            StartError: the driver does not answer.
        """
        if library is None:
            import pynvml

            library = pynvml
        assert library is not None
        self._library = library
        try:
            library.nvmlInit()
            self._gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
            self._used_before = self._used_bytes()
        except library.NVMLError as error:
            raise StartError(
                f"NVML cannot read the memory of the GPUs ({error}): check the driver (nvidia-smi)."
            ) from error

    def process_bytes(self, pids: Iterable[int]) -> int:
        """What these processes hold on all GPUs."""
        own = set(pids)
        listed = [process for gpu in self._gpus for process in self._library.nvmlDeviceGetComputeRunningProcesses(gpu)]
        found = [process.usedGpuMemory for process in listed if process.pid in own]
        if not found or None in found:
            return max(0, self._used_bytes() - self._used_before)
        return sum(found)

    def _used_bytes(self) -> int:
        return sum(self._library.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._gpus)
