"""Refuses a GPU that this process's torch cannot use, before anything is loaded on it, by naming what to install.

Knows torch's own answers. `shared.gpu_builds` has the tables; `deploy.tuning.gpus` asks the driver before a start.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import structlog
import torch

from shared.gpu_builds import build_problem, dtype_problem
from workers.engine.failures import LoadFailure

log = structlog.get_logger()


def check_gpu(device: str, dtype: str) -> None:
    """
    Args:
        device: a CUDA device.
        dtype: a value of TERCET_DTYPE.

    Raises:
        LoadFailure: torch was built without CUDA or without code for this GPU, or the GPU does not compute in `dtype`.
        RuntimeError: CUDA cannot be initialized.
    """
    if torch.version.cuda is None:
        if torch.cuda.is_available():  # a build for another vendor's GPUs
            return
        raise LoadFailure(
            "The installed torch was built without CUDA: install a build for this GPU (docs/GPU.md has the table), or "
            "set TERCET_DEVICES=cpu."
        )
    _initialize_driver()
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    architectures = torch.cuda.get_arch_list()
    problem = build_problem(name, capability, torch.version.cuda, architectures) or dtype_problem(
        name, capability, dtype
    )
    if problem is not None:
        raise LoadFailure(problem)
    if all(f"{capability[0]}{capability[1]}" not in architecture for architecture in architectures):
        log.info("gpu_not_among_builds", device=name, capability=capability, architectures=architectures)


def _initialize_driver() -> None:
    """Initializes the CUDA driver without the interpreter's lock, which torch would hold meanwhile.

    Of several GPUs without the persistence daemon that takes longer than gunicorn waits for a worker. torch reports
    what is wrong, so an error is ignored here.
    """
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)
