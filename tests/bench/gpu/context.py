"""What a stage is given: the device, the models and how much to measure. Validated by the command line."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.checkpoints.resolve import Checkpoint, resolve
from workers.engine.cuda.kernel_choice import Kernels

RESULTS, LOGS = "results", "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The same for all stages of a run. A rehearsal has no GPU: its figures mean nothing."""

    out: Path
    is_rehearsal: bool = False
    device: str = "cuda:0"  # of an engine; on "cpu:0" its CUDA backend computes in plain torch
    limit_s: float = 60.0  # of the stage that runs

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the stage's process, which `of` reads."""
        return str(self.out), str(self.limit_s), "rehearsal" if self.is_rehearsal else "measurement"

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Context:
        out, limit_s, kind = arguments
        return cls(out=Path(out), limit_s=float(limit_s), is_rehearsal=kind == "rehearsal")

    @property
    def is_cuda(self) -> bool:
        """Whether graphs and events can be used: a GPU, or a stand-in for it."""
        return self.device.startswith("cuda")

    @property
    def models(self) -> tuple[str, ...]:
        return ("embedded",) if self.is_rehearsal else ("synthetic:small", "synthetic:medium")

    @property
    def model(self) -> str:
        """The model of stages that measure one."""
        return self.models[0]

    @property
    def dtype(self) -> str:
        return "fp32" if self.is_rehearsal else "auto"

    @property
    def kernels(self) -> Kernels | None:
        """Kernels of the decode steps that are timed. None for those that a worker takes."""
        return "torch" if self.is_rehearsal else None

    @property
    def row_counts(self) -> tuple[int, ...]:
        return (1, 3) if self.is_rehearsal else (3, 96, 1, 12, 48)  # the targets' first

    @property
    def context_lengths(self) -> tuple[int, ...]:
        return (84, 150) if self.is_rehearsal else (84, 150, 512, 1000)

    @property
    def warm_up_s(self) -> float:
        return 0.01 if self.is_rehearsal else 1.0

    @property
    def num_replays(self) -> int:
        return 3 if self.is_rehearsal else 200

    @property
    def bandwidth_bytes(self) -> int:
        """The size of the array whose sum gives the bandwidth."""
        return 1 << (24 if self.is_rehearsal else 32)

    def result(self, stage: str) -> dict[str, Any]:
        """The rows of a stage that has run, by key; empty if it has not."""
        path = self.out / RESULTS / f"{stage}.json"
        if not path.exists():
            return {}
        rows: dict[str, Any] = json.loads(path.read_bytes())["rows"]
        return rows


@functools.cache
def subject(model: str) -> Checkpoint:
    """A model under test by its name."""
    return resolve(model)
