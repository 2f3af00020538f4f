"""The slot plan (which worker holds which model on which device) and who holds which slot.

The plan is one JSON file in the run directory; both masters, the gateway and the command line read the
same one. Making it (counting GPUs, fetching checkpoints) is `deploy.planning`'s work, done in a process
of its own, so that no master ever touches CUDA or a model library. This module knows no gunicorn.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from shared.errors import StartError
from shared.run_directory import prepare_run_directory
from shared.settings import Address, Settings

# How often a compute thread looks whether the others are there before it sleeps. By default it looks for
# milliseconds, and where anything else wants the cores the threads wait for each other's time slices. Three branches
# of 20 tokens (GPT-2 small's shape, two cores, medians of three interleaved rounds): beside two busy loops 746 ms by
# default and 510 with this, on a quiet machine 212 and 216.
SPIN_COUNT = "20000"
# A model this small leaves the other cores to the HTTP threads. The embedded checkpoint through the gateway, a request
# every 0.2 s on two cores: 42 ms with one thread (45 at p90), 49 with two (74), medians of three interleaved rounds.
ONE_THREAD_BYTES = 64 << 20
PLAN_FILE = "plan.json"
PLAN_LOCK_FILE = "plan.lock"
DRAINING_FILE = "draining"


class Model(msgspec.Struct, frozen=True):
    """A checkpoint that is on this machine and checked, ready to be loaded. `weight_bytes`: of its files."""

    name: str
    directory: str
    source: str
    n_ctx: int
    vocab_size: int
    weight_bytes: int = 1 << 30
    warning: str | None = None


class Slot(msgspec.Struct, frozen=True):
    """A worker's place: its model, its device, its private socket."""

    index: int
    device: str
    model: str
    socket: str
    max_batch: int


class Plan(msgspec.Struct, frozen=True):
    """All slots of one running instance. `made_of` holds what it was made from, to see when it is stale."""

    made_of: dict[str, str]
    models: list[Model]
    slots: list[Slot]

    @property
    def max_running(self) -> int:
        """Branches that all slots together compute at once."""
        return sum(slot.max_batch for slot in self.slots)

    def model(self, name: str) -> Model:
        return next(model for model in self.models if model.name == name)


def lay_out(devices: Sequence[str], models: Sequence[tuple[str, int]], run_path: Path, max_batch: int) -> list[Slot]:
    """Slots device by device, on each the models in the order given, each `count` times.

    Args:
        models: pairs of (name, workers per device).
    """
    places = [(device, name) for device in devices for name, count in models for _ in range(count)]
    return [
        Slot(index, device, name, str(run_path / f"slot-{index}.sock"), max_batch)
        for index, (device, name) in enumerate(places)
    ]


def worker_environment(slot: Slot, plan: Plan, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that a worker process needs before torch is imported.

    A `CUDA_VISIBLE_DEVICES` that is already set (Slurm, Kubernetes, UUIDs, MIG) is indexed into: `cuda:1` is its
    second entry. Compute threads are the cores this process may use, shared out among all workers, since two
    workers running two threads each on two cores are slower than one each.
    """
    if slot.device == "cpu":
        visible = ""
    else:
        index = int(slot.device.partition(":")[2])
        already = [entry.strip() for entry in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
        visible = already[index] if index < len(already) else str(index)
    num_threads = settings.cpu_threads or max(1, len(os.sched_getaffinity(0)) // len(plan.slots))
    if not settings.cpu_threads and plan.model(slot.model).weight_bytes < ONE_THREAD_BYTES:
        num_threads = 1
    return {
        "CUDA_VISIBLE_DEVICES": visible,
        "OMP_NUM_THREADS": str(num_threads),
        "GOMP_SPINCOUNT": environ.get("GOMP_SPINCOUNT", SPIN_COUNT),
        "TERCET_SLOT": str(slot.index),
    }


def check_address_free(address: Address) -> None:
    """gunicorn would retry for five seconds, and then say less.

    Raises:
        StartError: nothing can listen at the address.
    """
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise StartError(
                f"{address} cannot be listened on ({error.strerror}): set TERCET_BIND to another host:port."
            ) from error


def made_of(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """What a plan depends on. Two equal results mean that a plan may be used again."""
    return {
        "devices": ",".join(settings.devices),
        "models": ",".join(map(str, settings.models)),
        "compute": settings.compute,
        "max_batch": str(settings.max_batch),
        "visible": environ.get("CUDA_VISIBLE_DEVICES", "(unset)"),
        "run_path": str(settings.run_path),
    }


def read_plan(run_path: Path) -> Plan:
    """The plan in a run directory.

    Raises:
        StartError: there is none that can be read.
    """
    path = run_path / PLAN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError) as error:
        raise StartError(f"There is no slot plan at {path} ({error}): start Tercet with `tercet serve`.") from error


def write_plan(plan: Plan, run_path: Path) -> None:
    """Replace the plan in one step, so that no reader sees half of it."""
    temporary = run_path / f"{PLAN_FILE}.{os.getpid()}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
    temporary.replace(run_path / PLAN_FILE)


def current_plan(settings: Settings, environ: Mapping[str, str]) -> Plan:
    """The plan these settings ask for, made now if the run directory has none.

    Two masters that start together wait for one another here, so that checkpoints are fetched once.

    Raises:
        StartError: the plan cannot be made; `deploy.planning` has said why on standard error.
    """
    run_path = prepare_run_directory(settings)
    with (run_path / PLAN_LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            plan = read_plan(run_path)
            if plan.made_of == made_of(settings, environ):
                return plan
        except StartError:
            pass  # none yet, or one of another version: made anew below
        command = [sys.executable, "-m", "deploy", "plan", "--write"]
        root = Path(__file__).parent.parent
        if subprocess.run(command, cwd=root, env=dict(environ), stdout=subprocess.DEVNULL, check=False).returncode:
            raise StartError("The slot plan could not be made; the reason stands above.")
        return read_plan(run_path)
