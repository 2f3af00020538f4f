"""What a stage is given: the device, the models and how much to measure. Validated by the command line."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.gpu.record import read_result
from workers.checkpoints.resolve import resolve
from workers.engine.cuda.kernel_choice import Kernels

RESULTS, LOGS = "results", "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The same for all stages of a run. A rehearsal has no GPU: its figures mean nothing.

    Attributes:
        device: of an engine; on "cpu:0" its CUDA backend computes in plain torch.
        limit_s: of the stage that runs.
        kernels: of the decode steps that are timed; None for those that a worker takes.
        row_counts: the targets' first.
        bandwidth_bytes: size of the array whose sum gives the bandwidth.
    """

    out: Path
    is_rehearsal: bool = False
    device: str = "cuda:0"
    limit_s: float = 60.0
    models: tuple[str, ...] = ("synthetic:small", "synthetic:medium")
    dtype: str = "auto"
    kernels: Kernels | None = None
    row_counts: tuple[int, ...] = (3, 96, 1, 12, 48)
    context_lengths: tuple[int, ...] = (84, 150, 512, 1000)
    warm_up_s: float = 1.0
    num_replays: int = 200
    bandwidth_bytes: int = 1 << 32

    @classmethod
    def rehearsal(cls, out: Path, limit_s: float = 60.0) -> Context:
        return cls(
            out=out,
            is_rehearsal=True,
            limit_s=limit_s,
            models=("embedded",),
            dtype="fp32",
            kernels="torch",
            row_counts=(1, 3),
            context_lengths=(84, 150),
            warm_up_s=0.01,
            num_replays=3,
            bandwidth_bytes=1 << 24,
        )

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the stage's process, which `of` reads."""
        return str(self.out), str(self.limit_s), "rehearsal" if self.is_rehearsal else "measurement"

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Context:
        out, limit_s, kind = arguments
        if kind == "rehearsal":
            return cls.rehearsal(Path(out), float(limit_s))
        return cls(out=Path(out), limit_s=float(limit_s))

    @property
    def is_cuda(self) -> bool:
        """Whether graphs and events can be used: a GPU, or a stand-in for it."""
        return self.device.startswith("cuda")

    @property
    def model(self) -> str:
        """The model of stages that measure one."""
        return self.models[0]

    def result(self, stage: str) -> dict[str, Any]:
        """The rows of a stage that has run, by key; empty if it has not."""
        found = read_result(self.out / RESULTS / f"{stage}.json")
        return {} if found is None else found.rows


def short(model: str) -> str:
    """A model's name in rows."""
    return model.removeprefix("synthetic:")


subject = functools.cache(resolve)  # a model under test by its name
