"""The slot plan: which worker holds which model on which device.

It is one JSON file in the run directory, read by both masters, the gateway and the command line. This module knows its
format, not how devices are counted or checkpoints fetched (`deploy.planning`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shared.errors import StartError
from shared.memory_plan import Gpu, SlotMemory
from shared.run_directory import refusing_os_errors
from shared.settings import Settings

PLAN_FILE = "plan.json"
PLAN_LOCK_FILE = "plan.lock"


class Model(msgspec.Struct, frozen=True):
    """A checkpoint on this machine, checked and ready to be loaded. `weight_bytes` is the size of its weight files,
    `revision` their digest (`shared.weights.weights_digest`), or "synthetic"."""

    name: str
    directory: str
    source: str
    n_ctx: int
    vocab_size: int
    weight_bytes: int = 1 << 30
    warning: str | None = None
    revision: str = ""


class Slot(msgspec.Struct, frozen=True):
    """A worker's place: its model, its device, its private socket.

    `memory` is what it may allocate on its GPU; `cache_bytes`, on a CPU, the bound of its KV cache.
    """

    index: int
    device: str
    model: str
    socket: str
    max_batch: int
    memory: SlotMemory | None = None
    cache_bytes: int | None = None


class Plan(msgspec.Struct, frozen=True):
    """All slots of one running instance. `inputs` is what the plan was made from; when that changes, it is stale."""

    inputs: dict[str, str]
    models: list[Model]
    slots: list[Slot]
    gpus: list[Gpu] = []

    @property
    def max_successors(self) -> list[tuple[set[int], int]]:
        """For each GPU its slots, and how many of their workers may load while their predecessors serve."""
        return [
            ({slot.index for slot in self.slots if slot.device == gpu.device}, gpu.max_successors) for gpu in self.gpus
        ]

    @property
    def max_running(self) -> int:
        """Branches that all slots together compute at once."""
        return sum(slot.max_batch for slot in self.slots)

    def model(self, name: str) -> Model:
        return next(model for model in self.models if model.name == name)


def make_slots(devices: Sequence[str], models: Sequence[tuple[str, int]], run_path: Path, max_batch: int) -> list[Slot]:
    """Slots device by device; on each device the models in the given order, each `count` times.

    Args:
        models: pairs of (name, workers per device).
    """
    places = [(device, name) for device in devices for name, count in models for _ in range(count)]
    return [
        Slot(index, device, name, str(run_path / f"slot-{index}.sock"), max_batch)
        for index, (device, name) in enumerate(places)
    ]


def plan_inputs(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What a plan depends on. A plan with equal inputs may be used again."""
    return {
        "devices": ",".join(settings.devices),
        "models": ",".join(map(str, settings.models)),
        "compute": settings.compute,
        "max_batch": str(settings.max_batch),
        "dtype": settings.dtype,
        "cache_mb": str(settings.cache_mb),
        "visible": environ.get("CUDA_VISIBLE_DEVICES", "(unset)"),
        "run_path": str(settings.run_path),
    }


def read_plan(run_path: Path) -> Plan:
    """The plan in a run directory.

    Raises:
        StartError: there is no plan, or it cannot be read.
    """
    path = run_path / PLAN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"There is no slot plan at {path} ({error}): start Tercet with `tercet serve`.") from error


def read_current_plan(settings: Settings, environ: Mapping[str, str]) -> Plan | None:
    """The run directory's plan if it was made from these settings, else None."""
    try:
        plan = read_plan(settings.run_path)
    except StartError:  # no plan yet, or one in another version's format
        return None
    return plan if plan.inputs == plan_inputs(settings, environ) else None


def write_plan(plan: Plan, run_path: Path) -> None:
    """Replace the plan's file atomically, so that no reader sees half of it.

    Raises:
        StartError: the file cannot be written.
    """
    temporary = run_path / f"{PLAN_FILE}.{os.getpid()}"
    with refusing_os_errors("The slot plan cannot be written to", run_path):
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
            temporary.replace(run_path / PLAN_FILE)
        finally:
            temporary.unlink(missing_ok=True)
