"""The slot plan: which worker holds which model on which device.

It is one JSON file in the run directory, read by both masters, the gateway and the command line. This module knows its
format, not how devices are counted or checkpoints fetched (`deploy.tuning.planning`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import StartError, refusing_os_errors
from shared.home import start_directory
from shared.memory_plan import Gpu, SlotMemory
from shared.setting_values import Address
from shared.settings import Settings

PLAN_FILE = "plan.json"
PLAN_LOCK_FILE = "plan.lock"
# The source of a model that only workers of other machines hold (`TERCET_POOL`).
REMOTE = "remote"
# Branches that a gateway is prepared to run on workers of other machines at once; its bounds of threads derive from it,
# and threads are started as they are needed. How many workers there will be is not known at the start. One process
# answers some 350 requests a second on a core, so 1,024 branches would be answers of a second each.
MAX_REMOTE_BRANCHES = 1024


class Model(msgspec.Struct, frozen=True):
    """A checkpoint on this machine, checked and ready to be loaded. `weight_bytes` is the size of its weight files,
    `revision` their digest (`shared.weights.weights_digest`), or "synthetic". `warning` is for users, too; `note` says
    to those who start the instance why it is this model, and how it is served. `is_chat`: it has a chat template.

    Of a model that only other machines hold, the source is `REMOTE`, and `n_ctx` and `vocab_size` are 0 until a worker
    has reported them."""

    name: str
    directory: str
    source: str
    n_ctx: int
    vocab_size: int
    weight_bytes: int = 1 << 30
    warning: str | None = None
    revision: str = ""
    note: str | None = None
    is_chat: bool = False


class Remote(msgspec.Struct, frozen=True):
    """Where a worker of another machine is reached: at `address`, an IP address to which `host` resolves. TLS verifies
    `host`. `path` is a prefix of the paths of the internal protocol, "" or like "/small"."""

    scheme: Literal["http", "https"]
    host: str
    address: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return f"{Address(self.address, self.port)}{self.path}"


class Slot(msgspec.Struct, frozen=True):
    """A worker's place: its model, its device, its private socket.

    `memory` is what it may allocate on its GPU; `cache_bytes`, on a CPU, the bound of its KV cache. With `remote`, the
    slot is on another machine: it has no socket here, and its worker reports its device and batch.
    """

    index: int
    device: str
    model: str
    socket: str
    max_batch: int
    memory: SlotMemory | None = None
    cache_bytes: int | None = None
    remote: Remote | None = None


class Plan(msgspec.Struct, frozen=True):
    """All slots of one machine. `inputs` is what the plan was made from; when that changes, it is stale.

    Slots of other machines come and go while a gateway runs; only their models are in the plan, and
    `max_remote_branches`, which the gateway is prepared to run there at once.
    """

    inputs: dict[str, str]
    models: list[Model]
    slots: list[Slot]
    gpus: list[Gpu] = []
    max_remote_branches: int = 0

    @property
    def max_successors(self) -> list[tuple[set[int], int]]:
        """Return each GPU's slots, and how many of their workers may load while their predecessors serve."""
        return [
            ({slot.index for slot in self.slots if slot.device == gpu.device}, gpu.max_successors) for gpu in self.gpus
        ]

    @property
    def max_running(self) -> int:
        """Branches that all slots together compute at once, those of other machines included."""
        return sum(slot.max_batch for slot in self.slots) + self.max_remote_branches

    @property
    def default_model(self) -> str:
        """The model of a request that names none."""
        return self.slots[0].model if self.slots else self.models[0].name

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
        "devices": ",".join(settings.pool.devices),
        "models": ",".join(map(str, settings.model.models)),
        "directory": start_directory() if any((spec.source or "")[:1] == "." for spec in settings.model.models) else "",
        "pool": ",".join(map(str, settings.remote.pool)),
        "compute": settings.pool.compute,
        "max_batch": str(settings.pool.max_batch),
        "dtype": settings.model.dtype,
        "cache_mb": str(settings.pool.cache_mb),
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
