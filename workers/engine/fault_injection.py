"""Runners for tests: one is slow, one fails for chosen seeds. `EngineConfig` enables them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from workers.engine.runner import Runner, RunnerOutput
from workers.engine.scheduler_output import SchedulerOutput

Fault = Literal["oom", "device", "hang"]


class DelayedRunner:
    """A runner that pauses before each step and computes one decode step per call."""

    def __init__(self, runner: Runner, delay_s: float) -> None:
        self._runner = runner
        self._delay_s = delay_s
        self.num_entries = runner.num_entries

    def run(self, plan: SchedulerOutput) -> RunnerOutput:
        time.sleep(self._delay_s)
        return self._runner.run(replace(plan, allows_multi_step=False))

    def drop_caches(self) -> None:
        self._runner.drop_caches()


class FaultyRunner:
    """A runner whose step fails as a device does if its batch contains a sequence with a chosen seed."""

    def __init__(self, runner: Runner, faults: Mapping[int, Fault]) -> None:
        """
        Args:
            faults: by seed: the step raises an out-of-memory error or a fatal device error, or never ends.
        """
        self._runner = runner
        self._faults = faults
        self.num_entries = runner.num_entries

    def run(self, plan: SchedulerOutput) -> RunnerOutput:
        batch = [row.sequence for row in (*plan.rows, *plan.prefilled_rows)]
        batch += [sequence for chunk in plan.chunks for sequence in chunk.group.sequences]
        for sequence in batch:
            match self._faults.get(sequence.request.seed):
                case "oom":
                    raise torch.OutOfMemoryError("Injected: tried to allocate more memory than there is.")
                case "device":
                    raise RuntimeError("Injected: CUDA error: an illegal memory access was encountered.")
                case "hang":
                    while True:
                        time.sleep(0.01)
        return self._runner.run(plan)

    def drop_caches(self) -> None:
        self._runner.drop_caches()
