"""Finds the GPUs of this machine by `nvidia-smi`, and refuses what the installed torch cannot use.

Where a device node exists, an `nvidia-smi` that fails is an error: a server with GPUs serves on its CPU only if a
setting says so. Calls no CUDA and imports no torch.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from shared.errors import StartError
from shared.gpu_builds import Capability, build_problem, driver_problem, dtype_problem, installed_cuda
from shared.visible_gpus import visible_gpus

# Patterns of files; a GPU is there if all of a group exist. WSL has /dev/dxg with GPUs of any vendor, and mounts CUDA's
# library from an NVIDIA driver of Windows.
DEVICE_NODES = (("/dev/nvidia[0-9]*",), ("/dev/nvidiactl",), ("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so*"))
TIMEOUT_S = 10.0
# The name is last, because it may have commas.
_FIELDS = "index,uuid,driver_version,memory.total,name"
_MIG_LINE = re.compile(r"\s+MIG (?P<name>\S+\.(?P<gigabytes>\d+)gb\S*) .*\(UUID: (?P<uuid>[^)]+)\)")


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    """A GPU, or a MIG instance, as its driver describes it. What the driver does not say is None."""

    name: str
    index: str = ""  # of a MIG instance: none
    uuid: str = ""
    driver: str = ""
    memory_bytes: int | None = None
    capability: Capability | None = None


def list_gpus(nodes: Iterable[Sequence[str]] = DEVICE_NODES, timeout_s: float = TIMEOUT_S) -> list[InstalledGpu]:
    """The GPUs that `nvidia-smi` lists; none if there is no device node and it is missing, fails or hangs.

    Raises:
        StartError: there is a device node, and `nvidia-smi` is missing, fails, hangs, or lists no GPU.
    """
    try:
        found, reason = _read_gpus(timeout_s), "lists no GPU"
    except FileNotFoundError:
        found, reason = [], "is not installed"
    except subprocess.TimeoutExpired:
        found, reason = [], f"does not answer within {timeout_s:g} s"
    except (OSError, ValueError, subprocess.SubprocessError):
        found, reason = [], "fails"
    if found:
        return found
    node = next((group[0] for group in nodes if all(glob(pattern) for pattern in group)), None)
    if node is None:
        return []
    raise StartError(
        f"This machine has a GPU ({glob(node)[0]}), but nvidia-smi {reason}: check the driver (run nvidia-smi; after "
        "an update of the driver, restart the machine), in a container its runtime (--gpus all, "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility), or set TERCET_DEVICES=cpu to serve on the CPU."
    )


def check_gpus(devices: Iterable[str], dtype: str, environ: Mapping[str, str]) -> None:
    """Refuse GPUs that the installed torch, the driver or the data type does not serve, as far as the driver says.

    A worker checks again when it loads its model: where `CUDA_VISIBLE_DEVICES` hides nvidia-smi's answer, only then.

    Raises:
        StartError: with what to install or to set.
    """
    on_gpu = [device for device in devices if device != "cpu"]
    if not on_gpu:
        return
    is_installed, cuda = installed_cuda()
    gpus = list_gpus() if is_installed else []
    for device in on_gpu:
        gpu = find_gpu(device, gpus, environ)
        if gpu is None:
            continue
        problem = driver_problem(gpu.name, gpu.capability, gpu.driver, cuda)
        if gpu.capability is not None:
            problem = (
                build_problem(gpu.name, gpu.capability, cuda, None, gpu.driver)
                or problem
                or dtype_problem(gpu.name, gpu.capability, dtype)
            )
        if problem is not None:
            raise StartError(f"{device}: {problem} TERCET_DEVICES=cpu serves on the CPU.")


def has_mps(environ: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether processes started here use NVIDIA's Multi-Process Service.

    Args:
        root: directory under which the service's own directory is looked up.
    """
    directory = environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return (root / directory.lstrip("/") / "control").exists()


def known_mig_instances() -> list[InstalledGpu]:
    """Those that `nvidia-smi` lists; none where it is missing, fails or hangs. The memory of a MIG instance is that in
    its name, which is at most what it has."""
    with suppress(OSError, subprocess.SubprocessError):
        return [
            InstalledGpu(f"MIG {match['name']}", uuid=match["uuid"], memory_bytes=int(match["gigabytes"]) * 10**9)
            for match in map(_MIG_LINE.match, _run_nvidia_smi("-L").splitlines())
            if match
        ]
    return []


def find_gpu(device: str, gpus: Sequence[InstalledGpu], environ: Mapping[str, str]) -> InstalledGpu | None:
    """That of `gpus` which CUDA takes for `cuda:<n>`: entry n of `CUDA_VISIBLE_DEVICES` if that is set, else GPU n."""
    entry = device.partition(":")[2]
    if (visible := visible_gpus(environ)) is not None:
        entry = visible[int(entry)] if int(entry) < len(visible) else ""
    if not entry:
        return None
    if entry.startswith("MIG-"):
        gpus = known_mig_instances()
    # A UUID may be shortened, as long as it is unique.
    return next((gpu for gpu in gpus if gpu.index == entry or gpu.uuid.startswith(entry)), None)


def query_gpus(fields: str) -> list[list[str]]:
    """The values of these fields for each GPU; no row if `nvidia-smi` is missing, fails or hangs."""
    with suppress(OSError, subprocess.SubprocessError):
        return _query(fields)
    return []


def _run_nvidia_smi(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """
    Raises:
        OSError, subprocess.SubprocessError: nvidia-smi is missing, fails or hangs.
    """
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout


def _read_capability(text: str) -> Capability | None:
    """A compute capability like 9.0; None if the driver does not say."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _read_gpus(timeout_s: float) -> list[InstalledGpu]:
    """
    Raises:
        OSError, ValueError, subprocess.SubprocessError: nvidia-smi is missing, fails, hangs, or prints something else.
    """
    try:
        rows = _query(f"compute_cap,{_FIELDS}", timeout_s=timeout_s)
    except subprocess.CalledProcessError:  # drivers before 510 (not verified) have no such field
        rows = [["", *row] for row in _query(_FIELDS, timeout_s=timeout_s)]
    return [
        InstalledGpu(
            name, index, uuid, driver, int(memory) << 20 if memory.isdecimal() else None, _read_capability(capability)
        )
        for capability, index, uuid, driver, memory, name in rows
    ]


def _query(fields: str, timeout_s: float = TIMEOUT_S) -> list[list[str]]:
    """Rows of as many values as there are fields; raises as `_run_nvidia_smi`. Only the last may contain commas."""
    listed = _run_nvidia_smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", timeout_s=timeout_s)
    num_commas = fields.count(",")
    rows = [[value.strip() for value in line.split(",", num_commas)] for line in listed.splitlines()]
    return [row for row in rows if len(row) > num_commas]
