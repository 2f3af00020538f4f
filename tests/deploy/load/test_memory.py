"""Memory of processes. There is no GPU: a stand-in takes the place of NVIDIA's management library."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deploy.load.memory import GpuMemory, pss_bytes
from shared.errors import StartError

MIB = 1 << 20
HOLD = "memory = bytearray(b'x') * {size}; print('ready', flush=True); input()"


def test_pss_counts_what_a_process_holds() -> None:
    held = []
    for size in (0, 64 * MIB):
        with subprocess.Popen(
            [sys.executable, "-c", HOLD.format(size=size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            held.append(pss_bytes([process.pid]))
            process.communicate(b"\n")
        assert pss_bytes([process.pid]) == 0  # it has ended
    assert 60 * MIB < held[1] - held[0] < 70 * MIB


class Nvml(ModuleType):
    """A stand-in for `pynvml` with two GPUs."""

    class NVMLError(Exception):
        pass

    def __init__(self, processes: list[list[Any]], *, is_broken: bool = False) -> None:
        super().__init__("pynvml")
        self.processes, self.is_broken = processes, is_broken
        self.used = [100 * MIB, 0]

    def nvmlInit(self) -> None:
        if self.is_broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self.used[handle])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return self.processes[handle]


def process(pid: int, mebibytes: int | None) -> Any:
    return SimpleNamespace(pid=pid, usedGpuMemory=None if mebibytes is None else mebibytes * MIB)


def test_gpu_memory_is_that_of_the_processes_on_all_gpus() -> None:
    memory = GpuMemory(Nvml([[process(1, 10), process(7, 500)], [process(2, 20)]]))
    assert memory.process_bytes([1, 2]) == 30 * MIB


@pytest.mark.parametrize("listed", [[], [process(1, None)]], ids=["other process ids", "not reported"])
def test_where_the_driver_names_no_process_of_ours_the_use_counts(listed: list[Any]) -> None:
    nvml = Nvml([listed, []])
    memory = GpuMemory(nvml)
    nvml.used = [350 * MIB, 50 * MIB]
    assert memory.process_bytes([1]) == 300 * MIB


def test_a_driver_that_does_not_answer_is_reported() -> None:
    with pytest.raises(StartError, match=r"Driver Not Loaded.*nvidia-smi"):
        GpuMemory(Nvml([], is_broken=True))
