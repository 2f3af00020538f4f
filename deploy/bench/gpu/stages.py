"""The stages of a run, most valuable first: a run that is cut off has lost the least. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run in a process of its own.

    Attributes:
        module: below `deploy.bench.gpu`; its function `run(context, record)` measures.
        limit_s: the process is ended after this time.
        rehearsal_limit_s: the same without a GPU.
    """

    name: str
    title: str
    module: str
    limit_s: float
    rehearsal_limit_s: float = 90.0


def step_key(model: str, num_rows: int, num_tokens: int) -> str:
    """The name of a row of stage `decode`."""
    return f"{model.removeprefix('synthetic:')} rows={num_rows} context={num_tokens}"


STAGES = {
    stage.name: stage
    for stage in (
        Stage("machine", "machine, versions, bandwidth, launch cost, kernels in use", "machine", 60),
        Stage("decode", "decode step, replays timed by events", "decode", 110),
        Stage("tests", "GPU tests", "gpu_tests", 120, 200),
        Stage("request", "whole request against three generate calls, bf16", "requests", 90),
        Stage("seeds", "same seed alone and among 48", "seeds", 90),
        Stage("profile", "kernels and µs per replay", "profiles", 60),
        Stage("faults", "injected faults", "faults", 150, 200),
        Stage("compiled", "whole request against static cache and compile", "compiled", 110),
        Stage("workers", "four workers with memory nearly full, reload", "crowded", 90),
        Stage("memcheck", "compute-sanitizer memcheck", "memcheck", 80),
        Stage("racecheck", "compute-sanitizer racecheck", "racecheck", 80),
        Stage("cold", "no C compiler, empty Triton cache", "cold", 60),
        Stage("mps", "two workers with and without MPS", "mps", 70),
        Stage("train", "train the embedded checkpoint", "train", 3600),
    )
}
