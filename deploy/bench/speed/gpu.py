"""`tercet bench engine --device cuda`: the rows of the GPU table.

A decode step's floor is what it must read, weights and keys and values, at the memory's bandwidth. Series that this
machine's software cannot run (a compiler is missing, a library refuses GPT-2) are left out with their reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from rich.console import Console

from deploy.bench.harness.clients import LOOPBACK, check
from deploy.bench.harness.contender_process import ContenderProcess
from deploy.bench.harness.options import Options, progress
from deploy.bench.harness.report import Document, print_bandwidth
from deploy.bench.harness.rounds import Contender, Results, Series, interleave
from deploy.bench.harness.server import Server
from deploy.bench.harness.targets import Row, measured, not_measured
from deploy.bench.harness.workload import BASELINES, Subject, Workload, Writer
from workers.checkpoints.resolve import resolve

BYTES_PER_WEIGHT = 2  # bf16
# Issue 3's floors, for an H100's 3.35 TB/s: the models' 247 and 707 MB.
H100_FLOOR_MS = {"gpu-small": 0.074, "gpu-medium": 0.211}
MODELS = {"gpu-small": "synthetic:small", "gpu-medium": "synthetic:medium", "gpu-crowd": "synthetic:small"}
# 96 sequences that hold 140 to 160 tokens while they decode: 150 on average.
CROWD = Workload(num_prompt_tokens=140, num_samples=96)
CROWD_CONTEXT_TOKENS = 150

LABELS = {
    **BASELINES,
    "gateway": "ours: W through the gateway, cold",
    "gpu-small": "ours: decode step, batch 3, small",
    "gpu-medium": "ours: decode step, batch 3, medium",
    "gpu-crowd": "ours: decode step, batch 96, 150 tokens, small",
}


class GpuSuite:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, wanted: Sequence[str], console: Console) -> None:
        """
        Args:
            wanted: names of GPU targets.
        """
        self._options = options
        self._wanted = wanted
        self._console = console
        self._subject = options.subject()
        self._writer = Writer(self._subject.tokenizer(), options.seed)
        self._stack = ExitStack()

    def run(self, document: Document) -> None:
        shapes = self._start_ceiling(document)
        num_rounds = self._options.num_rounds
        with self._stack:
            contenders = self._whole_requests()
            with progress(self._console, "Rounds", (num_rounds + 1) * len(contenders)) as turn:
                results = interleave(contenders, num_rounds, turn)
        # An engine takes what memory is free for its cache: one after another, and none beside a server.
        names = [name for name in MODELS if name in self._wanted]
        with progress(self._console, "Decode steps", len(names)) as turn:
            for name in names:
                turn(LABELS[name])
                results.add(name, partial(self._steps, name))
        document.series |= {name: Series.of(LABELS[name], "ms", values) for name, values in results.samples.items()}
        document.not_measured |= {LABELS[name]: why for name, why in results.failures.items()}
        read_gb_s, is_h100 = document.ceiling["read_gb_s"], "H100" in "".join(document.machine.gpus)
        document.rows += [gpu_row(name, results, shapes, read_gb_s, is_h100) for name in self._wanted]

    def _start_ceiling(self, document: Document) -> dict[str, dict[str, int]]:
        """Bandwidth into the document; the shapes of the models whose steps are timed."""
        shapes = {}
        names = [name for name in MODELS if name in self._wanted]
        with self._console.status("Ceiling: memory …"):
            for name in names or ["gpu-small"]:
                subject = Subject.of(resolve(MODELS[name]))
                with ContenderProcess(
                    "deploy.bench.speed.ceiling:Ceiling", subject, self._options.device, 1
                ) as ceiling:
                    shapes[name] = ceiling.call("shape")
                    if not document.ceiling:
                        document.ceiling = ceiling.call("bandwidth", 1 << (27 if self._options.is_quick else 32))
        print_bandwidth(self._console, document.ceiling)
        return shapes

    def _whole_requests(self) -> list[Contender]:
        names = ["a-bf16"] if "gpu-request" in self._wanted else []
        names += ["b-bf16", "static", "continuous"] if "gpu-compiled" in self._wanted else []
        if not names:
            return []
        options, num_tokens = self._options, self._options.workload.num_prompt_tokens
        with self._console.status("Starting the baselines, and a server to measure …"):
            child = self._start(
                "speed.baselines:Baselines", self._subject, options.workload, options.device, options.num_threads
            )
            server = self._stack.enter_context(Server(options.models, options.server_settings))
            clients = self._start(
                "harness.clients:Clients",
                LOOPBACK,
                server.port,
                self._subject,
                options.workload,
                self._writer.seed(),
                {},
            )

        def baseline(name: str) -> Contender:
            return Contender(
                name, BASELINES[name], lambda: {name: [child.call("run", name, self._writer.ids(num_tokens))]}
            )

        def gateway() -> dict[str, list[float]]:
            return {"gateway": [reply.wall_ms for reply in check(clients.call("ask", 5))]}

        return [
            *(baseline(name) for name in names),
            Contender("gateway", "W through the gateway", gateway),
        ]

    def _steps(self, name: str) -> dict[str, list[float]]:
        """Milliseconds of a decode step, one value a round."""
        options = self._options
        settings, subject = options.load_settings(), Subject.of(resolve(MODELS[name]))
        workload = CROWD if name == "gpu-crowd" else options.workload
        max_batch = max(workload.num_samples, settings.max_batch)
        engine = ContenderProcess(
            "deploy.bench.speed.engine:EngineAlone", subject, options.device, settings.dtype, max_batch, None
        )
        with engine:
            runs = [
                engine.call("request", self._writer.ids(workload.num_prompt_tokens), workload, self._writer.seed())
                for _ in range(options.num_rounds + 1)
            ]
        return {name: [run.ms_per_step for run in runs[1:]]}

    def _start(self, factory: str, *args: Any) -> ContenderProcess:
        return self._stack.enter_context(ContenderProcess(f"deploy.bench.{factory}", *args))


def gpu_row(
    name: str, results: Results, shapes: Mapping[str, Mapping[str, int]], read_gb_s: float, is_h100: bool
) -> Row:
    """A row of the GPU table, or why it is not measured. Pure."""
    needed = {"gpu-request": ("a-bf16", "gateway"), "gpu-compiled": ("static", "gateway")}.get(name, (name,))
    for series in needed:
        if series in results.failures:
            return not_measured(name, f"{series} failed: {results.failures[series]}")
    middle = {series: median(results.samples[series]) for series in needed}
    if name in MODELS:
        at_measured = floor_ms(shapes[name], read_gb_s, CROWD.num_samples if name == "gpu-crowd" else 0)
        floor = H100_FLOOR_MS.get(name, at_measured) if is_h100 else at_measured
        return measured(
            name, middle[name] / floor, ours=middle[name], unit="ms", against=floor,
            floor_at_measured_bandwidth_ms=round(at_measured, 5),
        )  # fmt: skip
    other, ours = middle[needed[0]], middle["gateway"]
    return measured(name, other / ours, ours=ours, unit="ms", against=other)


def floor_ms(shape: Mapping[str, int], read_gb_s: float, num_sequences: int = 0) -> float:
    """Milliseconds to read a model's weights and the keys and values of `num_sequences` of 150 tokens, all in bf16."""
    num_values = 2 * shape["n_layer"] * shape["n_embd"] * CROWD_CONTEXT_TOKENS * num_sequences
    return BYTES_PER_WEIGHT * (shape["num_weights"] + num_values) / read_gb_s / 1e6
