"""Memory of processes: their share of the machine's memory, and what they hold on GPUs.

Asks the kernel, and NVIDIA's management library (nvidia-ml-py), which calls no CUDA. Does not know what
the processes do.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType

from shared.errors import StartError
from shared.process import proportional_set_size


def pss_bytes(pids: Iterable[int]) -> int:
    """The proportional set sizes of processes, added. A process that has ended counts nothing."""
    sizes = []
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            sizes.append(proportional_set_size(pid))
    return sum(sizes)


class GpuMemory:
    """Memory of the GPUs of this machine.

    In a container whose process ids are not the host's, the driver's list names no process of ours. Then the use of all
    GPUs counts, less what was used when this object was created.
    """

    def __init__(self, library: ModuleType | None = None) -> None:
        """
        Args:
            library: replacement for `pynvml`.

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
