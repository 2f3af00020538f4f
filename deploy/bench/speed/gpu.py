"""`tercet bench engine --device cuda`: the GPU rows.

The lower bound of a decode step is what it must read, weights and KV cache, divided by the memory bandwidth that this
run has measured, on every card. A step's time is that of replays of its graph between two events of the device, and
every row of a batch has a prompt of its own. A baseline that cannot run on this machine (no compiler, a library without
GPT-2) is left out with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

from rich.console import Console

from deploy.bench.speed.contenders import BASELINES, Contenders
from deploy.bench.speed.targets import Row, measured, not_measured
from deploy.load.clients import LOOPBACK, raise_for_status
from deploy.load.options import Options
from deploy.load.prompts import PromptGenerator
from deploy.load.report import Document, print_bandwidth
from deploy.load.rounds import Contender, Results, Series, interleave
from deploy.load.run import progress
from deploy.load.workload import Subject
from workers.checkpoints.resolve import resolve

BYTES_PER_VALUE = 2  # bf16
MODELS = {"gpu-small": "synthetic:small", "gpu-medium": "synthetic:medium", "gpu-crowd": "synthetic:small"}
# Rows and tokens of context of each row's step; W's context grows from 64 tokens to 84.
STEPS = {"gpu-small": (3, 84), "gpu-medium": (3, 84), "gpu-crowd": (96, 150)}
NUM_GATEWAY_REQUESTS = 5  # per round

LABELS = {
    **BASELINES,
    "gateway": "Tercet: W through the gateway, cold",
    "gpu-small": "Tercet: decode step, 3 rows, small",
    "gpu-medium": "Tercet: decode step, 3 rows, medium",
    "gpu-crowd": "Tercet: decode step, 96 different prompts of 150 tokens, small",
}


class GpuSuite:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, wanted: Sequence[str], console: Console) -> None:
        """
        Args:
            wanted: names of GPU rows.
        """
        self._options = options
        self._wanted = wanted
        self._console = console
        self._subject = options.subject()
        self._prompts = PromptGenerator(self._subject.tokenizer(), options.seed)

    def run(self, document: Document) -> None:
        shapes = self._measure_bandwidth(document)
        num_rounds = self._options.num_rounds
        with Contenders(self._options, self._console) as contenders:
            turns = self._start_whole_requests(contenders)
            with progress(self._console, "Rounds", (num_rounds + 1) * len(turns)) as turn:
                results = interleave(turns, num_rounds, turn)
        # An engine reserves the free GPU memory for its KV cache, so engines run one at a time and without a server.
        names = [name for name in MODELS if name in self._wanted]
        with progress(self._console, "Decode steps", len(names)) as turn:
            for name in names:
                turn(LABELS[name])
                results.add(name, partial(self._measure_steps, name))
        document.series |= {name: Series.of(LABELS[name], "ms", values) for name, values in results.samples.items()}
        document.not_measured |= {LABELS[name]: why for name, why in results.failures.items()}
        read_gb_s = document.ceiling["read_gb_s"]
        document.rows += [gpu_row(name, results, shapes, read_gb_s) for name in self._wanted]

    def _measure_bandwidth(self, document: Document) -> dict[str, dict[str, int]]:
        """The bandwidth, into the document; returns the shape of each model whose decode step is measured."""
        shapes = {}
        names = [name for name in MODELS if name in self._wanted]
        with self._console.status("Measuring the memory bandwidth …"):
            for name in names or ["gpu-small"]:
                subject = Subject.of(resolve(MODELS[name]))
                with Contenders(self._options, self._console) as contenders:
                    ceiling = contenders.start_process("speed.ceiling:Ceiling", subject, self._options.device, 1)
                    shapes[name] = ceiling.call("shape")
                    if not document.ceiling:
                        document.ceiling = ceiling.call("bandwidth", 1 << (27 if self._options.is_quick else 32))
        print_bandwidth(self._console, document.ceiling)
        return shapes

    def _start_whole_requests(self, contenders: Contenders) -> list[Contender]:
        """The baselines that a wanted row needs, and W through the gateway."""
        names = ["a-bf16"] if "gpu-request" in self._wanted else []
        names += ["b-bf16", "static", "continuous"] if "gpu-compiled" in self._wanted else []
        if not names:
            return []
        baselines = contenders.start_baselines(names, self._subject, self._prompts)
        server = contenders.start_server(self._options.models)
        clients = contenders.start_clients((LOOPBACK, server.port), self._subject, self._prompts.seed())

        def measure_gateway() -> dict[str, list[float]]:
            replies = raise_for_status(clients.call("send_new", NUM_GATEWAY_REQUESTS))
            return {"gateway": [reply.wall_ms for reply in replies]}

        return [*baselines, Contender("gateway", "W through the gateway", measure_gateway)]

    def _measure_steps(self, name: str) -> dict[str, list[float]]:
        """Milliseconds of a decode step, one value per replay."""
        options, (num_rows, num_tokens) = self._options, STEPS[name]
        device = "cuda:0" if options.device == "cuda" else "cpu:0"
        more = (0.01, 3) if options.is_quick else ()
        with Contenders(options, self._console) as contenders:
            steps = contenders.start_process(
                "speed.steps:DecodeSteps", Subject.of(resolve(MODELS[name])), device, options.load_settings().dtype,
                num_rows,
            )  # fmt: skip
            return {name: steps.call("time", num_rows, num_tokens, *more)}


def gpu_row(name: str, results: Results, shapes: Mapping[str, Mapping[str, int]], read_gb_s: float) -> Row:
    """A GPU row, or the reason why it was not measured. Pure."""
    needed = {"gpu-request": ("a-bf16", "gateway"), "gpu-compiled": ("static", "gateway")}.get(name, (name,))
    for series in needed:
        if series in results.failures:
            return not_measured(name, f"{series} failed: {results.failures[series]}")
    medians = {series: median(results.samples[series]) for series in needed}
    if name in MODELS:
        bound_ms = bandwidth_bound_ms(shapes[name], read_gb_s, *STEPS[name])
        return measured(name, medians[name] / bound_ms, ours=medians[name], unit="ms", against=bound_ms)
    other, ours = medians[needed[0]], medians["gateway"]
    return measured(name, other / ours, ours=ours, unit="ms", against=other)


def bandwidth_bound_ms(shape: Mapping[str, int], read_gb_s: float, num_rows: int, num_tokens: int) -> float:
    """Milliseconds to read the weights, and the KV cache of `num_rows` sequences of `num_tokens` tokens, all in bf16.

    The KV cache has 2 · n_layer · n_embd values per token.

    Args:
        shape: `num_weights`, `n_layer` and `n_embd` of the model.
        read_gb_s: memory bandwidth, 10⁹ bytes per second.
    """
    num_kv_values = 2 * shape["n_layer"] * shape["n_embd"] * num_tokens * num_rows
    return BYTES_PER_VALUE * (shape["num_weights"] + num_kv_values) / read_gb_s / 1e6
