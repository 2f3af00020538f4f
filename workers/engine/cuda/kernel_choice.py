"""Chooses the kernels of a model's decode step on a GPU, at each start.

`torch` is plain torch, `triton` the Triton kernels, which are compared with plain torch first: on this GPU, for this
model. With compiled kernels in Triton's cache that takes about two seconds. Does not know graphs and batches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Literal

import structlog
import torch

from workers.engine.cuda.forward import PLAIN_KERNELS, DecodeKernels
from workers.engine.failures import LoadFailure
from workers.engine.model.config import ModelConfig
from workers.engine.model.transformer import Transformer

Kernels = Literal["torch", "triton"]
# Compute capabilities for which the kernels are compiled ahead of time in the tests, and their registers bounded.
OLDEST_CAPABILITY, NEWEST_CAPABILITY = (7, 5), (9, 0)
REQUIRED_PACKAGES = {"triton": "triton", "cuda.bindings": "cuda-bindings"}  # by module
MAX_POSITIONS, CHECKED_POSITIONS = 32_768, 2048  # that the kernels attend to, and that are checked
CHECK_FAILED = "the kernels could not be compiled or launched; the worker's log has the reason"
NOT_COMPILED = "the compiled kernels cannot be written: set TERCET_CACHE_DIR to a directory that can be written to"
TOO_LONG = f"the kernels attend to {MAX_POSITIONS} positions at most"
log = structlog.get_logger()
# The first difference from plain torch, in words, or None. The number is that of the rows of the largest batch.
CheckFn = Callable[[ModelConfig, torch.dtype, int, torch.device], str | None]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernels to use, and why, if they are the plain ones."""

    kernels: Kernels
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kernels}: {self.reason}" if self.reason else self.kernels


def choose_kernels(
    config: ModelConfig, dtype: torch.dtype, max_sequences: int, device: torch.device, check: CheckFn | None = None
) -> KernelChoice:
    """The kernels for a model on a device; `check` is by default that of `kernels.self_check`.

    Raises:
        LoadFailure: a package is not installed.
        RuntimeError: the device failed during the check, or has no memory for it.
    """
    if device.type != "cuda":
        return KernelChoice("torch")
    reason = _refusal(torch.cuda.get_device_capability(device), config.n_positions)
    if reason is None:
        _require_packages()
        reason = _failed_check(partial(check or _self_check, config, dtype, max_sequences, device), device)
        torch.cuda.empty_cache()  # the KV cache is sized by what is free
    choice = KernelChoice("torch", reason) if reason else KernelChoice("triton")
    (log.warning if reason else log.info)("kernels_chosen", kernels=choice.kernels, reason=choice.reason)
    return choice


def _require_packages() -> None:
    for module, package in REQUIRED_PACKAGES.items():
        with suppress(ModuleNotFoundError):  # its parent is missing
            if find_spec(module) is not None:
                continue
        raise LoadFailure(
            f"The GPU's kernels need the package {package}, which is not installed: pip install {package}, or "
            "install Tercet with its pinned requirements again."
        )


def make_kernels(kernels: Kernels, model: Transformer, max_sequences: int, device: torch.device) -> DecodeKernels:
    """The kernels of a decode step; `max_sequences` is the number of rows of the largest batch."""
    if kernels == "torch":
        return PLAIN_KERNELS
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels  # which imports Triton

    step_kernels = TritonKernels(model.config, max_sequences, device)
    return DecodeKernels(lambda _length: step_kernels, is_length_bound=False)


def _refusal(capability: tuple[int, int], n_ctx: int) -> str | None:
    """Why a GPU of this compute capability takes the plain kernels; None if it does not have to."""
    if OLDEST_CAPABILITY <= capability <= NEWEST_CAPABILITY:
        return None if n_ctx <= MAX_POSITIONS else TOO_LONG
    oldest, newest, own = (".".join(map(str, one)) for one in (OLDEST_CAPABILITY, NEWEST_CAPABILITY, capability))
    return f"the kernels are compiled for compute capabilities {oldest} to {newest}, this GPU has {own}"


def _failed_check(check: Callable[[], str | None], device: torch.device) -> str | None:
    try:
        reason = check()
        torch.cuda.synchronize(device)
        return reason
    except (MemoryError, torch.OutOfMemoryError):
        raise  # not the kernels' fault
    except Exception as error:  # a compiler's errors are of any type
        # After an error of the device this fails as well, and ends the load; after a compiler's error it does not.
        torch.cuda.synchronize(device)
        log.warning("kernel_check_failed", exc_info=error)
        return NOT_COMPILED if isinstance(error, OSError) else CHECK_FAILED


def _self_check(config: ModelConfig, dtype: torch.dtype, max_sequences: int, device: torch.device) -> str | None:
    from workers.engine.cuda.kernels import self_check
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels

    # Of a long context the beginning, as plain torch needs much memory for more.
    checked = replace(config, n_positions=min(config.n_positions, CHECKED_POSITIONS))
    setting = self_check.CheckSetting(checked, dtype, max_sequences, device)
    results = self_check.check_kernels(TritonKernels(config, max_sequences, device), setting)
    return next((f"{one.name}: {one.fault}" for one in results if not one.is_correct), None)
