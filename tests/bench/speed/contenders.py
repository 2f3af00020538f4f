"""Starts what the speed benchmarks measure: the server under test, its clients, the baselines, the ceiling.

Knows which process each of them needs. Does not know which rows a benchmark reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from deploy.tuning.load.workload import PromptGenerator, Workload
from tests.bench.contender_process import ContenderProcess
from tests.bench.results import err
from tests.bench.rounds import Contender
from tests.bench.run import Options
from tests.bench.server import MeasuredServer, start_server
from workers.checkpoints.resolve import Checkpoint

# How each baseline answers W; `tests.bench.speed.baselines` runs them.
BASELINES = {
    "a": "baseline (a): 3 sequential generate calls, fp32",
    "a-bf16": "baseline (a): 3 sequential generate calls, bf16",
    "b-fp32": "baseline (b): generate(num_return_sequences=3), fp32",
    "b-bf16": "baseline (b): generate(num_return_sequences=3), bf16",
    "static": "baseline: generate(num_return_sequences=3), static cache + compile, bf16",
}


class LinearPass(msgspec.Struct, frozen=True):
    """All linear layers of the model, run `count` times: the blocks' layers on `num_rows` rows, the language-model head
    on `num_head_rows` rows."""

    num_rows: int
    num_head_rows: int
    count: int


def decode_passes(workload: Workload, num_requests: int = 1) -> list[LinearPass]:
    """The linear layers of the decode steps of concurrent requests; the prefill yields the first of the new tokens."""
    num_rows = workload.num_samples * num_requests
    return [LinearPass(num_rows, num_rows, workload.num_new_tokens - 1)]


def linear_passes(workload: Workload, num_requests: int = 1) -> list[LinearPass]:
    """The same with a prefill for each prompt, which needs the head only for the prompt's last position."""
    return [LinearPass(workload.num_prompt_tokens, 1, num_requests), *decode_passes(workload, num_requests)]


class Contenders(ExitStack):
    """The processes of one run; closing the stack ends them."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options

    def start_process(self, factory: str, *args: Any) -> ContenderProcess:
        """A contender by its "module:name"; its process starts at its first call."""
        return self.enter_context(ContenderProcess(factory, *args))

    def start_server(self, models: str) -> MeasuredServer:
        """The server under test, warm.

        Args:
            models: a value of `TERCET_MODELS`.
        """
        return self.enter_context(start_server(models, self._options.server_settings))

    def start_clients(self, address: tuple[str, int], subject: Checkpoint, seed: int) -> ContenderProcess:
        """`Clients` of the gateway at `address`, which send the options' workload."""
        return self.start_process("deploy.tuning.load.clients:Clients", *address, subject, self._options.workload, seed)

    def start_baselines(self, names: Sequence[str], subject: Checkpoint, prompts: PromptGenerator) -> list[Contender]:
        """One contender for each name of `BASELINES`, all in one process. Tokenization is not timed."""
        options = self._options
        process = self.start_process(
            "tests.bench.speed.baselines:Baselines", subject, options.workload, options.device, options.num_threads
        )

        def contender(name: str) -> Contender:
            num_tokens = options.workload.num_prompt_tokens
            return Contender(
                name, BASELINES[name], lambda: {name: [process.call("run", name, prompts.ids(num_tokens))]}
            )

        return [contender(name) for name in names]

    def start_ceiling(
        self, subject: Checkpoint, passes: Sequence[LinearPass]
    ) -> tuple[ContenderProcess, dict[str, Any]]:
        """The ceiling of the CPU, with its kernels chosen for the row counts of `passes`, and its figures.

        The bandwidth is printed: what follows is to be read against it.
        """
        is_quick = self._options.is_quick
        with err.status("Measuring the ceiling: memory bandwidth and matrix kernels …"):
            ceiling = self.start_process("tests.bench.speed.ceiling:Ceiling", subject, self._options.num_threads)
            figures = ceiling.call("bandwidth", 1 << (27 if is_quick else 30))
            err.print(
                f"Achieved memory bandwidth: read {figures['read_gb_s']:g} GB/s, copy {figures['copy_gb_s']:g} GB/s "
                "(read + written)",
                highlight=False,
            )
            row_counts = sorted({count for found in passes for count in (found.num_rows, found.num_head_rows)})
            figures["kernels_ms"] = ceiling.call("choose", row_counts, 1 if is_quick else 5) if row_counts else {}
        return ceiling, figures


def linear_layers(
    ceiling: ContenderProcess, name: str, label: str, passes: list[LinearPass], num_repeats: int
) -> Contender:
    """The contender that runs these linear layers alone, each with its fastest kernel."""
    return Contender(name, label, lambda: {name: ceiling.call("run", passes, num_repeats)})
