"""Whether NVIDIA's Multi-Process Service (MPS) is in use, and what it would change for the plans that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deploy.tune.results import Candidate, Measurement

MPS_SOCKET = Path("/tmp/nvidia-mps/control")


def mps_note(plans: Mapping[Candidate, Measurement], environ: Mapping[str, str]) -> str:
    """What MPS would change; empty where no GPU has several workers, or MPS is running."""
    shared = [candidate for candidate in plans if candidate.workers > 1 and candidate.devices[0] != "cpu"]
    if not shared or has_mps(environ):
        return ""
    alone_qps = max((plan.capacity_qps for candidate, plan in plans.items() if candidate.workers == 1), default=0.0)
    shared_qps = max(plans[candidate].capacity_qps for candidate in shared)
    return (
        f"No MPS: without NVIDIA's Multi-Process Service the workers of a GPU take turns, and their kernels "
        f"never run at the same time. Measured so: one worker per GPU {alone_qps:.1f} requests/s, several "
        f"{shared_qps:.1f}. With MPS their kernels overlap and the second figure can rise; each worker still reads the "
        "weights itself. To measure it: start the service (nvidia-cuda-mps-control -d), then run the same command: "
        "plans with MPS are measured apart."
    )


def has_mps(environ: Mapping[str, str], socket: Path = MPS_SOCKET) -> bool:
    """Whether processes started here use NVIDIA's Multi-Process Service."""
    directory = environ.get("CUDA_MPS_PIPE_DIRECTORY")
    return (Path(directory) / "control" if directory else socket).exists()
