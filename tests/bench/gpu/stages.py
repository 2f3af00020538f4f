"""The stages of a run, most valuable first, each in a process with a limit, within one budget of time.

A run that is cut off has lost the least. Knows processes, limits and result files. Does not know what a stage measures.
Imports no torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.bench.gpu.commands import run_command
from tests.bench.gpu.context import LOGS, RESULTS, Context, short
from tests.bench.gpu.record import FINAL, StageResult, read_result, write_json

MIN_STAGE_S = 10.0  # no stage is begun with less
MAX_REASON_CHARS = 300
# Keep cuBLAS from dividing a product along its depth, which is done differently for each number of rows: it has no
# memory for partial sums. Source: vLLM's batch-invariant mode, for compute capability 9.0 and newer.
PINS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1", "TORCH_BLAS_PREFER_CUBLASLT": "1"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run in a process of its own.

    Attributes:
        part: A or B; each ends within ten minutes, and neither needs the other.
        function: "module:name" below `tests.bench.gpu`; called with the context and the recorder.
        limit_s: the process is ended after this time, in a rehearsal after twice as long.
        environment: variables that are added to the process's.
    """

    part: str
    name: str
    function: str
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


def step_key(model: str, num_rows: int, num_tokens: int) -> str:
    """The name of a row of stage `decode`."""
    return f"{short(model)} rows={num_rows} context={num_tokens}"


STAGES = {
    stage.name: stage
    for stage in (
        Stage("A", "smoke", "smoke:run", 60),  # each kernel against plain torch
        Stage("A", "machine", "machine:run", 40),  # machine, versions, bandwidth, kernels, memory
        Stage("A", "decode", "decode:run", 110),  # decode step, replays timed by events
        Stage("A", "prefill", "decode:run_prefill", 40),  # prefill program
        Stage("A", "request", "requests:run", 80),  # whole request against three generate calls, bf16; with pauses
        Stage("A", "seeds", "seeds:run", 80),  # same seed alone and among 48
        Stage("A", "products", "seeds:run_plain", 50),  # plain torch: seeds and steps
        Stage("A", "pinned", "seeds:run_plain", 50, environment=PINS),  # the same with cuBLAS pinned
        Stage("B", "faults", "starts:run_faults", 60),  # a worker that is killed, and one whose device fails
        Stage("B", "memory", "starts:run_memory", 60),  # a worker with 1.05 × and 0.9 × of its plan's memory
        Stage("B", "cold", "starts:run_cold", 50),  # from exec to warm, without and with compiled kernels
        # GPU tests: kernels, graphs and texts; none has a server, and none lets a device or a process fail.
        Stage("B", "tests", "gpu_tests:run", 120),
        Stage("B", "workers", "requests:run_workers", 60),  # one worker on the GPU against two
        Stage("B", "mps", "requests:run_mps", 40),  # two with MPS
        Stage("B", "compiled", "requests:run_compiled", 110),  # whole request against static cache and compile
        Stage("B", "memcheck", "smoke:run_memcheck", 60),  # self-check of the kernels under compute-sanitizer
    )
}


def run_stages(
    context: Context, stages: Sequence[Stage], budget_s: float, on_result: Callable[[StageResult], None]
) -> None:
    """Run every stage that has no final result yet.

    A stage that fails or runs past its limit keeps its rows, and the next one begins. An exception (SystemExit of a
    signal) ends the stage that runs.
    """
    deadline = time.monotonic() + budget_s
    for stage in stages:
        left_s = deadline - time.monotonic()
        found = stored(context, stage.name)
        if left_s >= MIN_STAGE_S and (found is None or found.state not in FINAL):
            limit_s = stage.limit_s * (2 if context.is_rehearsal else 1)
            on_result(_run_stage(replace(context, limit_s=min(limit_s, left_s)), stage))


def stored(context: Context, name: str) -> StageResult | None:
    """The result of a stage in this run or an earlier one of the same kind; a rehearsal's figures are none of a GPU."""
    found = read_result(context.out / RESULTS / f"{name}.json")
    return found if found is not None and found.is_rehearsal == context.is_rehearsal else None


def _run_stage(context: Context, stage: Stage) -> StageResult:
    command = [sys.executable, "-m", "tests.bench.gpu.stage_process", stage.name, *context.arguments]
    done = run_command(command, context.limit_s, context.out / LOGS / f"{stage.name}.log", stage.environment)
    result = stored(context, stage.name) or StageResult(stage=stage.name, is_rehearsal=context.is_rehearsal)
    if result.state == "partial":
        result.state = "timed out" if done.code is None else "failed"
        result.reason = f"exit code {done.code}: {done.last_line[:MAX_REASON_CHARS]}"
        if done.code is None:
            result.reason = f"ended after its limit of {context.limit_s:.0f} s"
        write_json(context.out / RESULTS / f"{stage.name}.json", result)
    return result
