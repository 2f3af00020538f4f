"""Adds the memory of the GPUs to a slot plan, and refuses a plan that does not fit.

Asks `nvidia-smi` for the cards' memory, reads the sizes of models from their `config.json`, and leaves the arithmetic
to `shared.memory_plan`. Knows no CUDA. A card whose memory is not reported is planned without a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import msgspec
from rich.table import Table

from deploy.tuning.gpus import InstalledGpu, find_gpu, list_gpus
from shared.errors import StartError
from shared.memory_plan import Division, Gpu, ModelShape, divide, largest, needed_bytes, usable_bytes, worker_needs
from shared.plan import Model, Plan, Slot
from shared.settings import Settings
from workers.checkpoints.files import read_config
from workers.engine.model.config import SHAPES, ModelConfig

GIB = 1 << 30


def with_memory(plan: Plan, settings: Settings, environ: Mapping[str, str]) -> Plan:
    """The plan with the memory of each GPU and of each worker on it.

    Raises:
        StartError: the workers of a GPU do not fit.
    """
    devices = list(dict.fromkeys(slot.device for slot in plan.slots if slot.device != "cpu"))
    installed = list_gpus(nodes=()) if devices else []  # a card of unknown memory is planned, too
    if settings.pool.compute == "cpu" and not installed:
        return plan
    shapes = {model.name: memory_shape(model_config(model)) for model in plan.models}
    gpus: list[Gpu] = []
    slots = {slot.index: slot for slot in plan.slots}
    for device in devices:
        card = find_gpu(device, installed, environ) or InstalledGpu("GPU of unknown memory")
        own = [slot for slot in plan.slots if slot.device == device]
        division = _divide(card, own, shapes, settings)
        gpus.append(Gpu(device, card.name, card.memory_bytes, division.max_successors))
        for slot in own:
            needs = worker_needs(shapes[slot.model], settings.model.dtype, slot.max_batch)
            slots[slot.index] = msgspec.structs.replace(slot, memory=needs.memory(division.num_entries))
    return msgspec.structs.replace(plan, slots=list(slots.values()), gpus=gpus)


def _divide(
    card: InstalledGpu, slots: Sequence[Slot], shapes: Mapping[str, ModelShape], settings: Settings
) -> Division:
    max_batch = slots[0].max_batch

    def division(names: Sequence[str], batch: int) -> Division | None:
        assert card.memory_bytes is not None
        needs = [worker_needs(shapes[name], settings.model.dtype, batch) for name in names]
        return divide(card.memory_bytes, needs)

    names = [slot.model for slot in slots]
    if card.memory_bytes is None:
        least = worker_needs(shapes[names[0]], settings.model.dtype, max_batch).least_entries
        return Division(least, max_successors=1)
    if (found := division(names, max_batch)) is not None:
        return found
    # What would fit: fewer workers of the model that has the most, or a smaller batch.
    ((model, count),) = Counter(names).most_common(1)
    others = [name for name in names if name != model]
    most_workers = largest(count, lambda number: division([*others, *[model] * number], max_batch) is not None)
    most_batch = largest(max_batch, lambda batch: division(names, batch) is not None)
    plus = "".join(f" and {name}*{number}" for name, number in Counter(others).items())
    lower = (
        f"set TERCET_MODELS to at most {model}*{most_workers}{plus} per device"
        if most_workers
        else "take models out of TERCET_MODELS"
    )
    batch = f"TERCET_MAX_BATCH to at most {most_batch}" if most_batch else "a smaller TERCET_MAX_BATCH too"
    device = slots[0].device
    raise StartError(
        f"{device} ({card.name}, {card.memory_bytes / GIB:.1f} GiB) does not hold {model}*{count}{plus} with "
        f"TERCET_MAX_BATCH={max_batch}: {lower}, or {batch}, or name GPUs with more memory in TERCET_DEVICES."
    )


def model_config(model: Model) -> ModelConfig:
    """The hyperparameters of a model of the plan."""
    if model.source == "synthetic":
        shape = SHAPES[model.name.removeprefix("synthetic:")]
        return replace(shape, n_positions=model.n_ctx, vocab_size=model.vocab_size)
    return read_config(Path(model.directory))


def memory_shape(config: ModelConfig) -> ModelShape:
    """The sizes that determine a model's memory."""
    num_weights = sum(map(prod, replace(config, has_own_head=True).weight_shapes().values()))
    return ModelShape(config.n_layer, config.kv_width, config.n_positions, config.vocab_size, num_weights)


def memory_tables(plan: Plan) -> Iterator[Table | str]:
    """Return a table for each GPU of what its workers may allocate and what a reload does, for `tercet plan`."""
    for gpu in plan.gpus:
        slots = [(slot, slot.memory) for slot in plan.slots if slot.device == gpu.device and slot.memory is not None]
        memories = [memory for _, memory in slots]
        card = "" if gpu.memory_bytes is None else f", {gpu.memory_bytes / GIB:.1f} GiB"
        table = Table("slot", "model", "weights", "KV cache", "other", "sum", title=f"{gpu.device}: {gpu.name}{card}")
        for column in table.columns[2:]:
            column.justify = "right"
        for slot, memory in slots:
            sizes = (memory.weight_bytes, memory.cache_bytes, memory.other_bytes, memory.total_bytes)
            table.add_row(str(slot.index), slot.model, *(f"{size / GIB:.2f}" for size in sizes))
        table.add_row("all", "", "", "", "", f"{needed_bytes(memories, 0) / GIB:.2f}")
        yield table
        reload = f"A reload needs {needed_bytes(memories, 1) / GIB:.2f} GiB"
        if gpu.memory_bytes is None:
            yield f"{reload}; the driver does not report the card's memory. Sizes in GiB; `other` is an estimate."
            continue
        yield (
            f"{reload} of the {usable_bytes(gpu.memory_bytes) / GIB:.2f} that workers may use: "
            + (
                "SIGHUP replaces the workers of this GPU one by one; each serves until its successor is warm."
                if gpu.max_successors
                else "SIGHUP is refused; `tercet reload` stops each worker before it loads the successor."
            )
            + " Sizes in GiB; `other` is an estimate."
        )
