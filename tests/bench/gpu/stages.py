"""The stages of a run, most valuable first: a run that is cut off has lost the least. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run in a process of its own.

    Attributes:
        function: "module:name" below `tests.bench.gpu`; called with the context and the recorder.
        limit_s: the process is ended after this time.
        rehearsal_limit_s: the same without a GPU.
    """

    name: str
    title: str
    function: str
    limit_s: float
    rehearsal_limit_s: float = 90.0


def step_key(model: str, num_rows: int, num_tokens: int) -> str:
    """The name of a row of stage `decode`."""
    return f"{model.removeprefix('synthetic:')} rows={num_rows} context={num_tokens}"


STAGES = {
    stage.name: stage
    for stage in (
        Stage("machine", "machine, versions, bandwidth, launch cost, kernels in use", "machine:run", 60),
        Stage("decode", "decode step, replays timed by events", "decode:run", 110),
        Stage("tests", "GPU tests", "gpu_tests:run", 120, 200),
        Stage("request", "whole request against three generate calls, bf16", "requests:run", 90),
        Stage("seeds", "same seed alone and among 48", "seeds:run", 90),
        Stage("profile", "kernels and µs per replay", "profiles:run", 60),
        Stage("compiled", "whole request against static cache and compile", "requests:run_compiled", 110),
    )
}
