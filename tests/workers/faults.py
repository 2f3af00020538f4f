"""Engines that are slow or fail as a device does: for tests that need to act during a step, or after a failure."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn

import torch

from workers.engine.batch import RunnerOutput, SchedulerOutput
from workers.engine.core import Runner
from workers.engine.cpu.team import Interrupt
from workers.engine.engine import EngineConfig, RunnerFactory
from workers.engine.failures import OutOfMemory
from workers.engine.loader import LoadedModel

Fault = Literal["oom", "oom_step", "device", "assert", "hang"]


@dataclass(frozen=True, slots=True)
class Faults(RunnerFactory):
    """Makes runners that are slow or fail.

    Attributes:
        step_delay_s: pause before each step, which then is a single decode step.
        by_seed: how a step with a sequence of this seed fails: the memory does not suffice for the sequence ("oom") or
            the whole step ("oom_step"), the device fails, a kernel on the GPU does ("assert"), or the step never ends.
        on_load: how each load fails.
    """

    step_delay_s: float = 0.0
    by_seed: Mapping[int, Fault] = field(default_factory=dict)
    on_load: Fault | None = None

    def make(self, loaded: LoadedModel, config: EngineConfig, interrupt: Interrupt) -> Runner:
        if self.on_load is not None:
            raise_fault(self.on_load)
        return RunnerFactory.make(self, loaded, config, interrupt)

    def serving(self, runner: Runner) -> Runner:
        if self.step_delay_s:
            runner = DelayedRunner(runner, self.step_delay_s)
        return FaultyRunner(runner, self.by_seed) if self.by_seed else runner


def raise_fault(fault: Fault) -> NoReturn:
    """Fails as a device does: an out-of-memory error, a fatal device error, or no return."""
    match fault:
        case "oom" | "oom_step":
            raise torch.OutOfMemoryError("Injected: tried to allocate more memory than there is.")
        case "device":
            raise torch.AcceleratorError("Injected: CUDA error: an illegal memory access was encountered.")
        case "assert":  # CUDA fails in this process from then on
            torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.long, device="cuda")].cpu()
            raise AssertionError("The GPU has read behind a tensor's end.")
        case "hang":
            while True:
                time.sleep(0.01)


class DelayedRunner:
    """A runner that pauses before each step and computes one decode step per call."""

    def __init__(self, runner: Runner, delay_s: float) -> None:
        self._runner = runner
        self._delay_s = delay_s
        self.num_entries = runner.num_entries

    def run(self, scheduled: SchedulerOutput) -> RunnerOutput:
        time.sleep(self._delay_s)
        return self._runner.run(replace(scheduled, allows_multi_step=False))

    def drop_caches(self) -> None:
        self._runner.drop_caches()


class FaultyRunner:
    """A runner that fails if a step's batch contains a sequence with a chosen seed."""

    def __init__(self, runner: Runner, faults: Mapping[int, Fault]) -> None:
        """
        Args:
            faults: as `Faults.by_seed`.
        """
        self._runner = runner
        self._faults = faults
        self.num_entries = runner.num_entries

    def run(self, scheduled: SchedulerOutput) -> RunnerOutput:
        batch = [row.sequence for row in (*scheduled.rows, *scheduled.prefilled_rows)]
        batch += [sequence for chunk in scheduled.chunks for sequence in chunk.group.sequences]
        victims = []
        for sequence in batch:
            fault = self._faults.get(sequence.request.seed)
            if fault == "oom":
                victims.append(sequence)
            elif fault is not None:
                raise_fault(fault)
        output = self._runner.run(scheduled)
        if not victims:
            return output
        return replace(
            output,
            tokens=[(sequence, token) for sequence, token in output.tokens if sequence not in victims],
            failures=[(sequence, OutOfMemory()) for sequence in victims],
        )

    def drop_caches(self) -> None:
        self._runner.drop_caches()
