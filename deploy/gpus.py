"""Finds the GPUs of this machine by `nvidia-smi`, and refuses what the installed torch cannot use.

Where a device node exists, an `nvidia-smi` that fails is an error: a server with GPUs serves on its CPU only if a
setting says so. Calls no CUDA and imports no torch.
"""

from __future__ import annotations

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
_FIELDS = "index,uuid,name,driver_version"


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    """A GPU as its driver describes it. `capability` is None if the driver does not say."""

    index: str
    uuid: str
    name: str
    driver: str
    capability: Capability | None


def list_gpus(nodes: Iterable[Sequence[str]] = DEVICE_NODES, timeout_s: float = TIMEOUT_S) -> list[InstalledGpu]:
    """The GPUs that `nvidia-smi` lists; none if there is no device node.

    Raises:
        StartError: there is a device node, and `nvidia-smi` is missing, fails, hangs, or lists no GPU.
    """
    try:
        try:
            rows = _query(f"{_FIELDS},compute_cap", timeout_s=timeout_s)
        except subprocess.CalledProcessError:  # drivers before 510 (not verified) have no such field
            rows = [[*row, ""] for row in _query(_FIELDS, timeout_s=timeout_s)]
        found = [
            InstalledGpu(index, uuid, name, driver, read_capability(text)) for index, uuid, name, driver, text in rows
        ]
        reason = "lists no GPU"
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
        gpu = _gpu_of(device, gpus, environ)
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


def _gpu_of(device: str, gpus: Sequence[InstalledGpu], environ: Mapping[str, str]) -> InstalledGpu | None:
    """The GPU of `cuda:<n>`; None if it is a MIG instance, or not listed."""
    entry = visible_entry(device, environ)
    is_uuid = entry.startswith("GPU-")
    return next((gpu for gpu in gpus if (gpu.uuid.startswith(entry) if is_uuid else gpu.index == entry)), None)


def visible_entry(device: str, environ: Mapping[str, str]) -> str:
    """The GPU that CUDA takes for `cuda:<n>`: entry n of `CUDA_VISIBLE_DEVICES` if that is set, else n itself.

    It is empty if there are fewer entries.
    """
    number = device.partition(":")[2]
    if (visible := visible_gpus(environ)) is None:
        return number
    return visible[int(number)] if int(number) < len(visible) else ""


def query_gpus(fields: str, *options: str) -> list[list[str]]:
    """The values of these fields for each GPU; no row if `nvidia-smi` is missing, fails or hangs."""
    with suppress(OSError, subprocess.SubprocessError):
        return _query(fields, *options)
    return []


def run_nvidia_smi(*arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """
    Raises:
        OSError, subprocess.SubprocessError: nvidia-smi is missing, fails or hangs.
    """
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout


def read_capability(text: str) -> Capability | None:
    """A compute capability like 9.0; None if the driver does not say."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _query(fields: str, *options: str, timeout_s: float = TIMEOUT_S) -> list[list[str]]:
    """Rows of as many values as there are fields; raises as `run_nvidia_smi`. Only the last may contain commas."""
    listed = run_nvidia_smi(*options, f"--query-gpu={fields}", "--format=csv,noheader,nounits", timeout_s=timeout_s)
    num_commas = fields.count(",")
    rows = [[value.strip() for value in line.split(",", num_commas)] for line in listed.splitlines()]
    return [row for row in rows if len(row) > num_commas]
