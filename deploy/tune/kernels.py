"""`tercet tune --kernels`: chooses the kernels of each model on each GPU of the plan by measuring them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from statistics import median
from typing import Any, Protocol

import typer
from rich.console import Console
from rich.table import Table

from deploy.load.contender_process import ContenderProcess
from deploy.load.run import progress
from deploy.planning import make_plan
from shared.errors import StartError
from shared.plan import Model, Plan, Slot, read_current_plan
from shared.run_directory import lock_holder
from shared.settings import Settings
from shared.worker_environment import cache_directory, worker_environment
from workers.engine.cuda.kernel_store import Kernels, KernelStore, StoredChoice

ROWS = (1, 3, 12, 48, 96)
NUM_ROUNDS, NUM_REPLAYS = 7, 50
CANDIDATES: tuple[Kernels, ...] = ("torch", "triton", "fused")
# Other kernels than Triton's are chosen if they are faster by this share: seeded texts change with the choice.
LEAST_GAIN = 0.02
ENDED = "its process ended ({error})"

out = Console()
err = Console(stderr=True)


class Steps(Protocol):
    """What is called of `step_timer.StepTimer`, by name, in its process."""

    def call(self, method: str, *args: Any) -> Any: ...


@dataclass
class Measurement:
    """Kernels of one model on one GPU.

    Attributes:
        key: of the stored choice.
        rejected: kernels → why they cannot be used.
        same_bits: kernels → whether a row's logits are the same alone and among others.
        step_us: kernels → rows → median duration of a step.
    """

    key: str
    gpu: str
    dtype: str
    rejected: dict[Kernels, str] = field(default_factory=dict)
    same_bits: dict[Kernels, bool] = field(default_factory=dict)
    step_us: dict[Kernels, dict[int, float]] = field(default_factory=dict)


def tune_kernels(rows: str, num_rounds: int, *, is_quick: bool) -> None:
    """Compare the GPU's kernels with plain torch, time the decode step with each, and store the fastest.

    Args:
        rows: batch sizes to time, separated by commas.
        num_rounds: interleaved rounds; their median counts.
        is_quick: one short round; nothing is stored.

    Raises:
        StartError: there is no GPU, a server uses it, or a model cannot be loaded.
        typer.BadParameter: `rows` are no batch sizes.
    """
    settings = Settings.load(os.environ)
    plan = read_current_plan(settings, os.environ) or make_plan(settings, os.environ)
    places = gpu_places(plan, settings)
    warn_of_processes()
    num_rounds, num_replays = (1, 2) if is_quick else (num_rounds, NUM_REPLAYS)
    store, batch_sizes = KernelStore(cache_directory(settings)), _rows(rows)
    seen: set[str] = set()
    for slot in places:
        start = partial(_process, plan.model(slot.model), settings, batch_sizes[-1])
        place = f"{slot.model} on {slot.device}"
        with _environment(worker_environment(slot, plan, settings, os.environ)):
            measurement = measure(start, batch_sizes, num_rounds, num_replays, place, seen)
        if measurement is None:
            err.print(f"{slot.device} is the same model of GPU: the choice for {slot.model} holds there, too.")
            continue
        out.print(table(measurement, f"{place}: {measurement.gpu}, {measurement.dtype}"))
        if is_quick:
            out.print("[yellow]Quick run:[/] a functional check; nothing is stored. Do not quote its figures.")
        else:
            out.print(store_choice(store, measurement), highlight=False)


def gpu_places(plan: Plan, settings: Settings) -> list[Slot]:
    """A slot for each pair of GPU and model of the plan.

    Raises:
        StartError: the plan has no GPU, or a server uses it.
    """
    pairs = {(slot.device, slot.model): slot for slot in reversed(plan.slots) if slot.device != "cpu"}
    if settings.compute == "cpu" or not pairs:
        raise StartError(
            "tercet tune --kernels needs a GPU, and the plan has none (tercet plan shows it): run it on a machine with "
            "a GPU, with TERCET_DEVICES unset or naming it."
        )
    if (holder := lock_holder(settings, "workers") or lock_holder(settings, "serve")) is not None:
        raise StartError(
            f"A server uses the GPUs of this plan (process {holder.pid}): stop it first. Its work would spoil the "
            "measurement, and workers that restart later would use other kernels than those that run."
        )
    return sorted(pairs.values(), key=lambda slot: slot.index)


def warn_of_processes() -> None:
    """Says which other processes use the GPUs of this machine; their work would make the times too long."""
    command = ["nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    if lines := [line.strip() for line in listed.splitlines() if line.strip()]:
        err.print(f"[yellow]Other processes use the GPUs:[/] {'; '.join(lines)}. Times may be too long.")


def measure(
    start: Callable[[], Any],
    rows: list[int],
    num_rounds: int,
    num_replays: int,
    title: str,
    seen: set[str],
) -> Measurement | None:
    """Checks and times all kernels; those whose process ends are measured no more.

    Args:
        start: a context manager with `Steps` in a new process.
        seen: keys that are measured already; the new key is added.

    Returns:
        None if the key was seen.

    Raises:
        StartError: the model cannot be loaded, or the steps with plain torch fail.
    """
    rejected: dict[Kernels, str] = {}
    while True:
        in_use: Kernels = "torch"
        try:
            with start() as steps:
                key, gpu, dtype = steps.call("describe")
                if key in seen:
                    return None
                measurement = Measurement(key, gpu, dtype, rejected)
                for kernels in _turns(measurement, steps, rows, num_rounds, num_replays, title):
                    in_use = kernels
        except StartError as error:
            if in_use == "torch":
                raise
            rejected[in_use] = ENDED.format(error=str(error).partition("\n")[0])
        else:
            seen.add(measurement.key)
            return measurement


def _turns(
    measurement: Measurement, steps: Steps, rows: list[int], num_rounds: int, num_replays: int, title: str
) -> Iterator[Kernels]:
    """Fills the measurement; yields the kernels that the next call uses."""
    candidates = [one for one in CANDIDATES if one not in measurement.rejected]
    with progress(err, title, len(candidates) * (1 + len(rows) * (1 + num_rounds))) as turn:
        for kernels in tuple(candidates):
            yield kernels
            turn(f"comparing {kernels}")
            if kernels != "torch" and (reason := steps.call("check", kernels)) is not None:
                measurement.rejected[kernels] = reason
                candidates.remove(kernels)
                continue
            measurement.same_bits[kernels] = steps.call("has_same_bits", kernels)
        for number in sorted(rows, reverse=True):  # the largest first: the others use its memory again
            for kernels in candidates:
                yield kernels
                turn(f"capturing {kernels}, {number} rows")
                steps.call("capture", kernels, number)
        times: dict[tuple[Kernels, int], list[float]] = {}
        for number in rows:
            for _ in range(num_rounds):
                for kernels in candidates:
                    yield kernels
                    turn(f"timing {kernels}, {number} rows")
                    times.setdefault((kernels, number), []).append(steps.call("replay", kernels, number, num_replays))
    for (kernels, number), samples in times.items():
        measurement.step_us.setdefault(kernels, {})[number] = round(median(samples), 1)


def choose(measurement: Measurement) -> StoredChoice:
    """The fastest kernels, by the geometric mean over the batch sizes; Triton's if no others gain LEAST_GAIN."""
    step_us = measurement.step_us
    means = {kernels: prod(times.values()) ** (1 / len(times)) for kernels, times in step_us.items()}
    preferred: Kernels = "triton" if "triton" in means else "torch"
    best = min(means, key=means.__getitem__)
    chosen = best if means[best] < (1 - LEAST_GAIN) * means[preferred] else preferred
    reason = ""
    if chosen == "torch":
        reason = measurement.rejected.get("triton", "plain torch was measured to be faster on this GPU")
    return StoredChoice(chosen, reason, step_us=step_us)


def store_choice(store: KernelStore, measurement: Measurement) -> str:
    """Stores the choice; returns what changed, for the operator."""
    choice = choose(measurement)
    with store.locked():
        before = store.read(measurement.key)
        store.write(measurement.key, choice)
        is_stored = store.read(measurement.key) is not None
    chosen = f"[bold]{choice.status}[/]" + (f" ({choice.reason})" if choice.reason else "")
    if not is_stored:
        return f"Fastest: {chosen}. [red]Not stored:[/] set TERCET_CACHE_DIR to a directory that can be written to."
    if before is None or before.status == "checking":
        return f"Stored: {chosen}, where nothing was chosen before. Workers use it from their next start."
    if before.status == choice.status:
        return f"Stored: {chosen}, as before. Seeded texts stay the same."
    return (
        f"Stored: {chosen} instead of {before.status}. [yellow]Seeded texts on this model of GPU change[/] with the "
        "next start of each worker."
    )


def table(measurement: Measurement, title: str) -> Table:
    """Durations of a step, relative to plain torch."""
    plain = measurement.step_us["torch"]
    found = Table("kernels", *(f"{rows} rows" for rows in plain), "same bits alone and in a batch", title=title)
    for column in found.columns[1:-1]:
        column.justify = "right"
    chosen = choose(measurement).status
    for kernels in CANDIDATES:
        if kernels in measurement.rejected:
            found.add_row(kernels, measurement.rejected[kernels], *[""] * len(plain), style="dim")
            continue
        cells = [f"{us:.0f} µs ({us / plain[rows]:.2f} ×)" for rows, us in measurement.step_us[kernels].items()]
        bits = "yes" if measurement.same_bits[kernels] else "no"
        found.add_row(kernels, *cells, bits, style="bold" if kernels == chosen else "")
    return found


def _process(model: Model, settings: Settings, max_rows: int) -> ContenderProcess:
    synthetic = model.name.partition(":")[2] if model.source == "synthetic" else ""
    factory = "deploy.tune.step_timer:step_timer"
    return ContenderProcess(factory, model.directory, synthetic, settings.dtype, max_rows)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes started inside."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _rows(text: str) -> list[int]:
    try:
        rows = sorted({int(part) for part in text.split(",")})
    except ValueError:
        rows = []
    if not rows or rows[0] < 1 or rows[-1] > 512:
        raise typer.BadParameter("must be numbers from 1 to 512, separated by commas, like 1,3,48", param_hint="--rows")
    return rows
