"""What a decode step costs the engine's thread on the host, when the device takes no time.

A real `Engine` with a real `CudaRunner`; only the device's part is replaced, by kernels and a model that compute
nothing. A GPU waits for this work where a step takes it less time, so it bounds the throughput of a batch. Measurable
on every machine.
"""

# ruff: noqa: ARG002 - kernels that compute nothing do not read their arguments

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from unittest.mock import patch

import torch
from rich.table import Table
from torch import Tensor

from workers.engine import engine as engines
from workers.engine.cuda.forward import DecodeKernels
from workers.engine.cuda.runner import CudaRunner
from workers.engine.engine import Engine, EngineConfig
from workers.engine.model.gpt2 import GPT2, GPT2Config, LoadedModel, Norm
from workers.engine.request import EngineRequest, SamplingParams
from workers.gunicorn_worker import SWITCH_INTERVAL_S

NUM_ROWS = (1, 3, 12, 48, 96)
MAX_US = {3: 50.0, 96: 250.0}  # targets, by number of rows
NUM_TOKENS = 200  # of each row
TOKEN_ID = 5
MAX_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class HostCost:
    """Of a batch of `num_rows` sequences: the median over rounds of the CPU time of the engine's thread."""

    num_rows: int
    us_per_step: float
    max_us: float | None  # the target; None if there is none


class _NoKernels:
    """`StepKernels` that compute nothing: each row draws TOKEN_ID."""

    name = "none"

    def __init__(self, _length: int) -> None:
        self._drawn: dict[int, Tensor] = {}
        self._integers = torch.zeros(1, 1, dtype=torch.long)
        self._hidden = torch.zeros(1, 1)

    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor) -> tuple[Tensor, Tensor]:
        return self._integers, self._hidden

    def add_norm(self, x: Tensor, y: Tensor | None, norm: Norm) -> Tensor:
        return x

    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        return qkv

    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        size = table.shape[1]
        if size not in self._drawn:
            self._drawn[size] = torch.full((2, size), -1.0, dtype=torch.float64)
            self._drawn[size][0] = TOKEN_ID
        return self._drawn[size]


def measure_host_costs(num_rounds: int, numbers: Sequence[int] = NUM_ROWS) -> list[HostCost]:
    """Host time of a decode step of each number of rows.

    Raises:
        RuntimeError: an engine does not become warm.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    kernels = DecodeKernels(_NoKernels, is_length_bound=True)

    def make_runner(loaded: LoadedModel, config: EngineConfig, _: object) -> CudaRunner:
        return CudaRunner(loaded, config.max_batch, kernels=kernels)

    with patch.object(engines, "make_runner", make_runner):
        return [HostCost(number, _us_per_step(number, num_rounds), MAX_US.get(number)) for number in numbers]


def cost_table(costs: Sequence[HostCost]) -> Table:
    table = Table(title="Host time of a decode step: CPU time of the engine's thread, device part empty")
    for heading in ("rows", "µs per step", "at most", "µs per row and step"):
        table.add_column(heading, justify="right")
    for cost in costs:
        bound = "" if cost.max_us is None else f"{cost.max_us:g}"
        mark = "" if cost.max_us is None or cost.us_per_step <= cost.max_us else " ✗"
        per_row = f"{cost.us_per_step / cost.num_rows:.1f}"
        table.add_row(str(cost.num_rows), f"{cost.us_per_step:.0f}{mark}", bound, per_row)
    return table


def _us_per_step(num_rows: int, num_rounds: int) -> float:
    changed = threading.Condition()

    def announce() -> None:
        with changed:
            changed.notify_all()

    config = EngineConfig(device="cpu:0", max_batch=max(num_rows, 3), hang_s=0.0, num_threads=1)
    engine = Engine(config, lambda _: _empty_model(), on_change=announce, on_fatal=lambda _: announce())
    others = set(threading.enumerate())
    engine.start()
    with changed:
        changed.wait_for(lambda: engine.status().state in {"warm", "failed"}, MAX_WAIT_S)
    if (status := engine.status()).state != "warm":
        raise RuntimeError(f"the engine is {status.state}: {status.reason}")
    thread = next(one for one in set(threading.enumerate()) - others if one.name == "engine")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    times = []
    for seed in range(1 + num_rounds):
        before = time.clock_gettime(clock)
        _generate(engine, num_rows, NUM_TOKENS, seed)
        between = time.clock_gettime(clock)
        _generate(engine, num_rows, 1, seed)  # what is not a decode step: submission, prefill, the first token
        rest_s = time.clock_gettime(clock) - between
        times.append(1e6 * (between - before - rest_s) / (NUM_TOKENS - 1))
    engine.stop(0)
    return median(times[1:])


def _generate(engine: Engine, num_rows: int, num_tokens: int, seed: int) -> None:
    """Requests as the gateway makes them: with a deadline, siblings of one prompt."""
    params = SamplingParams(num_tokens, top_k=50, top_p=0.95)
    deadline = time.monotonic() + MAX_WAIT_S
    requests = [
        EngineRequest((1, 2, 3), params, seed * num_rows + row, group_size=num_rows, deadline=deadline)
        for row in range(num_rows)
    ]
    for stream in [engine.submit(request) for request in requests]:
        output = stream.result()
        assert len(output.token_ids) == num_tokens, output.finish_reason


def _empty_model() -> LoadedModel:
    """A model without layers, whose head computes nothing."""
    config = GPT2Config(vocab_size=256, n_embd=8, n_layer=1, n_head=1, n_inner=8, eos_token_id=None)
    numbers = torch.zeros(config.n_positions, config.n_embd)
    logits = torch.zeros(1, config.vocab_size)
    model = GPT2(
        config=config, token_embedding=numbers[: config.vocab_size], position_embedding=numbers, layers=(),
        norm=Norm(numbers[0], numbers[0], 1e-5), head=lambda _: logits,
    )  # fmt: skip
    return LoadedModel(model, "cpu:0", "fp32")
