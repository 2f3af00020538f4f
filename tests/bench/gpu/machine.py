"""Stage `machine`: what the figures depend on. Bandwidth is the sum of an array that no cache holds."""

from __future__ import annotations

import os
import platform
import shutil
from statistics import median
from typing import Any

import torch
from structlog.testing import capture_logs

from deploy.tuning.gpus import query_gpus
from deploy.tuning.load import run as frame
from tests.bench.gpu.context import Context, subject
from tests.bench.gpu.record import Recorder, Skipped
from tests.bench.gpu.steps import time_replays
from tests.bench.speed.engine_alone import load
from workers.engine.cuda.runner import CudaRunner

QUERY = (
    "name,uuid,driver_version,vbios_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,memory.total,"
    "memory.used,temperature.gpu,power.draw,power.limit,compute_mode,mig.mode.current,persistence_mode,ecc.mode.current"
)
TOOLS = ("nvidia-smi", "nvcc", "ptxas", "cc", "gcc", "compute-sanitizer", "ncu", "nvidia-cuda-mps-control")
MAX_SEQUENCES = 8


def run(context: Context, record: Recorder) -> None:
    record.measure("driver", _driver)
    record.measure("versions", _versions)
    record.measure("device", lambda: _device(context))
    record.measure("bandwidth", lambda: bandwidth(context))
    record.measure("kernels", lambda: _kernels_in_use(context))


def _driver() -> dict[str, Any]:
    if not (gpus := query_gpus(QUERY)):
        raise Skipped("nvidia-smi is missing or fails: no driver, clocks and power")
    return {"gpus": [dict(zip(QUERY.split(","), values, strict=True)) for values in gpus]}


def _versions() -> dict[str, Any]:
    return {
        **frame.versions(("transformers", "triton", "cuda-bindings", "numpy")),
        "cuda_of_torch": torch.version.cuda or "none",
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,  # type: ignore[no-untyped-call]
        "tools": {name: shutil.which(name) for name in TOOLS},
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _device(context: Context) -> dict[str, Any]:
    if not context.is_cuda:
        raise Skipped("no GPU and no stand-in for it")
    found = torch.cuda.get_device_properties(0)
    names = ("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size", "warp_size")
    free, total = torch.cuda.mem_get_info(0)
    return {name: getattr(found, name, None) for name in names} | {"free_bytes": free, "total_bytes": total}


@torch.inference_mode()
def bandwidth(context: Context) -> dict[str, Any]:
    """Achieved read bandwidth: bytes of the array ÷ median time of its sum."""
    device = context.device if context.is_cuda else "cpu"
    data = torch.ones(context.bandwidth_bytes // 4, device=device)
    times = time_replays(data.sum, context.is_cuda, 0.2 * context.warm_up_s, 3 if context.is_rehearsal else 20)
    return {
        "read_gb_s": round(context.bandwidth_bytes / 1e6 / median(times), 1),
        "best_read_gb_s": round(context.bandwidth_bytes / 1e6 / min(times), 1),
    }


def _kernels_in_use(context: Context) -> dict[str, Any]:
    """What a worker's runner uses on this device, and what it logged about fallbacks."""
    loaded = load(subject(context.model), context.device, context.dtype)
    with capture_logs() as logs:
        runner = CudaRunner(loaded, 2 if context.is_rehearsal else MAX_SEQUENCES)
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    found = {
        "kernels": runner.kernels or "torch",
        "dtype": str(loaded.model.token_embedding.dtype).removeprefix("torch."),
        "used_mib": (total - free) >> 20,  # CUDA's context included, if this process is alone on the GPU
        "log": logs,
    }
    del runner
    return found


def measured_gb_s(context: Context) -> float:
    """The read bandwidth of stage `machine`; measured now if that has not run."""
    found = context.result("machine").get("bandwidth") or bandwidth(context)
    return float(found["read_gb_s"])
