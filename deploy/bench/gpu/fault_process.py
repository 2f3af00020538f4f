"""One fault in this process: `python -m deploy.bench.gpu.fault_process FAULT DEVICE DTYPE [--raise]`.

On a GPU the faults are real: its memory is taken, a kernel asserts, a kernel spins. With `--raise`, where there is no
GPU, torch's exceptions are raised instead. Ends with exit code 70 where a worker does; else prints what was observed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import workers.engine.engine as engine_module
from deploy.bench.gpu.context import Context
from deploy.bench.gpu.engines import running_engine
from deploy.bench.gpu.faults import FATAL
from deploy.bench.speed.steps import load
from shared.telemetry import configure_logging
from workers.engine.cuda.graphs import GraphRecorder
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.runner import Runner, RunnerOutput
from workers.engine.scheduler_output import SchedulerOutput

LEFT_BYTES = 16 << 20  # of a GPU's memory, when it is full
BAD_SEED = 13
HANG_S = 3.0
MAX_BATCH = 3  # few graphs to capture
SPIN_CYCLES = 60 * 2_000_000_000


class BreakingRunner:
    """A runner that breaks at each step of a sequence with BAD_SEED."""

    def __init__(self, runner: Runner, break_device: Any) -> None:
        self._runner = runner
        self._break_device = break_device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, plan: SchedulerOutput) -> RunnerOutput:
        batch = [row.sequence for row in (*plan.rows, *plan.prefilled_rows)]
        batch += [sequence for chunk in plan.chunks for sequence in chunk.group.sequences]
        if any(sequence.request.seed == BAD_SEED for sequence in batch):
            self._break_device()
        return self._runner.run(plan)


class Faults:
    """Each method breaks something, on a device or by raising what torch raises then."""

    def __init__(self, device: str, is_real: bool) -> None:
        self._device, self._is_real = device, is_real
        self._hog: torch.Tensor | None = None

    def run_out_of_memory(self) -> None:
        if self._is_real:
            torch.empty(1 << 50, dtype=torch.uint8, device=self._device)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def assert_on_device(self) -> None:
        if self._is_real:
            torch.zeros(1, device=self._device)[torch.tensor([1 << 20], device=self._device)]
            torch.cuda.synchronize()
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def stall(self) -> None:
        if self._is_real:
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        time.sleep(60)

    def take_memory(self) -> None:
        if self._is_real:
            free, _ = torch.cuda.mem_get_info()
            self._hog = torch.empty(max(0, free - LEFT_BYTES), dtype=torch.uint8, device=self._device)

    def free_memory(self) -> None:
        self._hog = None
        if self._is_real:
            torch.cuda.empty_cache()


def main(fault: str, device: str, dtype: str, is_real: bool) -> str:
    """What was observed."""
    faults = Faults(device, is_real)
    context = Context(out=Path(), is_rehearsal=not is_real, device=device)

    def exit_as_a_worker(_failure: object) -> None:
        os._exit(FATAL)

    def start(**options: Any) -> Any:
        return running_engine(
            context, "embedded", dtype, on_fatal=exit_as_a_worker, hang_s=HANG_S, max_batch=MAX_BATCH, **options
        )

    def request(seed: int) -> EngineRequest:
        return EngineRequest(tuple(range(300, 320)), SamplingParams(8), seed)

    if fault in {"oom-request", "device-assert-request", "stalled-stream"}:
        action = {"oom-request": faults.run_out_of_memory, "device-assert-request": faults.assert_on_device}
        break_device = action.get(fault, faults.stall)
        make_runner = engine_module.make_runner

        def make_breaking_runner(*args: Any) -> BreakingRunner:
            return BreakingRunner(make_runner(*args), break_device)

        setattr(engine_module, "make_runner", make_breaking_runner)  # noqa: B010 - its type is another
        with start() as engine:
            failure = engine.submit(request(BAD_SEED)).result().failure
            kind = None if failure is None else failure.kind
            first = {"out_of_memory": "failed", None: "did not fail"}.get(kind, f"failed: {kind}")
            outputs = [engine.submit(request(seed)).result() for seed in (1, 2)]
            served = "was served" if all(output.token_ids for output in outputs) else "was empty"
            return f"one request {first}, the next {served}"
    if fault == "oom-capture":
        setattr(GraphRecorder, "record", lambda *_args, **_more: faults.run_out_of_memory())  # noqa: B010
        return _start(start)
    if fault == "device-assert-load":

        def fail() -> LoadedModel:
            faults.assert_on_device()
            raise AssertionError("not reached")

        return _start(lambda: start(make=fail))

    # oom-load: memory is taken first, and freed after the first failure.
    attempts = 0

    def load_twice() -> LoadedModel:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            if is_real:
                faults.take_memory()
            else:
                faults.run_out_of_memory()
        else:
            faults.free_memory()
        from deploy.bench.gpu.context import subject

        return load(subject("embedded"), device, dtype)

    first = _start(lambda: start(make=load_twice))
    return f"{first}, then {_start(lambda: start(make=load_twice))}"


def _start(start: Any) -> str:
    try:
        with start():
            return "warm"
    except RuntimeError:
        return "not warm"


if __name__ == "__main__":
    configure_logging("bench", "info")
    watchdog = threading.Timer(50, lambda: os._exit(3))
    watchdog.daemon = True
    watchdog.start()
    found = main(sys.argv[1], sys.argv[2], sys.argv[3], "--raise" not in sys.argv)
    sys.stdout.write(json.dumps({"observed": found}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a broken context may fail at the interpreter's end
