"""`http`: the real gateway under closed-loop clients, level by level.

Decides which clients run when, and what is computed from their replies. Does not know how a request is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.load.clients import LOOPBACK, LoadResult
from deploy.load.prompts import PromptGenerator
from deploy.tune.results import latency_figures
from shared.errors import StartError
from tests.bench.contender_process import ContenderProcess
from tests.bench.rounds import Contender, Series, interleave, percentile
from tests.bench.run import BenchDocument, Options, format_number
from tests.bench.speed.contenders import BASELINES, Contenders, linear_layers, linear_passes

LEVELS = (1, 2, 3, 4, 8, 16)
SECONDS = 6.0  # per level and round
QUICK_SECONDS = 0.3
STREAMED_SHARE = 0.25  # of SECONDS, for streamed requests after the others
NOTES = [
    "Closed loop: a client sends a request after each response; a turn awaits the requests in flight at its end.",
    "* TTFT: time to first token of streamed requests, in turns of their own; the first text delta is a whole word.",
    "Ceiling: requests per second if only the linear layers took time (a prefill per prompt, decode steps batched).",
    "Baseline (a): one process, 3 sequential generate calls, fp32, without HTTP; the same at every level.",
    "Patsnap: ten prompts of 2 tokens in one request, 40 new tokens each; its post reports less than 600 ms on a GPU.",
    "Client CPU: share of the cores that the clients used, and the server therefore could not.",
]


class HttpBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, levels: Sequence[int], console: Console) -> None:
        """
        Args:
            levels: numbers of concurrent clients.
        """
        self._options, self._levels, self._console = options, levels, console
        self._seconds = QUICK_SECONDS if options.is_quick else SECONDS

    def run(self, document: BenchDocument) -> None:
        if document.device != "cpu":
            document.not_measured["ceiling"] = (
                "on a GPU, kernel launches bound the time of single layers; see `make gpu`"
            )
        with Contenders(self._options, self._console) as contenders:
            turns = [*self._start_references(document, contenders), *self._start_clients(document, contenders)]
            results = interleave(turns, self._options.num_rounds, self._console)
        samples = results.samples
        document.not_measured |= results.failures
        labels = {"a": BASELINES["a"]}
        labels |= {ceiling_series(number): f"ceiling: linear layers of {number} × W" for number in self._levels}
        document.series = {
            name: Series.of(label, "ms", samples[name]) for name, label in labels.items() if name in samples
        }
        num_cores = self._options.num_threads
        document.rows = [
            summarise(number, samples, num_cores) for number in self._levels if f"{number}.wall" in samples
        ]
        if "patsnap.wall" in samples:
            document.rows.append(summarise(1, samples, num_cores, workload="Patsnap", prefix="patsnap"))
        document.notes += NOTES

    def _start_references(self, document: BenchDocument, contenders: Contenders) -> list[Contender]:
        """The ceiling of each level, on a CPU, and baseline (a)."""
        options, subject = self._options, self._options.subject()
        turns = []
        if document.device == "cpu":
            passes = {number: linear_passes(options.workload, number) for number in self._levels}
            all_passes = [linear_pass for level_passes in passes.values() for linear_pass in level_passes]
            ceiling, document.ceiling = contenders.start_ceiling(subject, all_passes)
            turns += [
                linear_layers(ceiling, ceiling_series(number), f"linear layers of {number} requests", level_passes, 1)
                for number, level_passes in passes.items()
            ]
        prompts = PromptGenerator(subject, options.seed)
        return turns + contenders.start_baselines(["a"], subject, prompts)

    def _start_clients(self, document: BenchDocument, contenders: Contenders) -> list[Contender]:
        options = self._options
        server = contenders.start_server(options.models)
        document.settings |= server.in_effect()
        clients = contenders.start_clients((LOOPBACK, server.port), options.subject(), options.seed)

        def measure_patsnap() -> Mapping[str, Sequence[float]]:
            return _samples("patsnap", clients.call("send_batches_for", self._seconds))

        patsnap = Contender("patsnap.wall", "Patsnap's workload", measure_patsnap)
        return [*(self._level(clients, number) for number in self._levels), patsnap]

    def _level(self, clients: ContenderProcess, number: int) -> Contender:
        def measure() -> Mapping[str, Sequence[float]]:
            samples = _samples(str(number), clients.call("send_for", number, self._seconds))
            streamed: LoadResult = clients.call("send_for", number, STREAMED_SHARE * self._seconds, True)
            first_ms = [reply.first_text_ms for reply in streamed.replies if reply.status == 200]
            return {**samples, f"{number}.first": first_ms}

        return Contender(f"{number}.wall", f"{number} clients", measure)


def _samples(name: str, load: LoadResult) -> dict[str, list[float]]:
    answered = [reply for reply in load.replies if reply.status == 200]
    return {
        f"{name}.wall": [reply.wall_ms for reply in answered],
        f"{name}.errors": [len(load.replies) - len(answered)],
        f"{name}.elapsed": [load.elapsed_s],
        f"{name}.cpu": [load.client_cpu_s],
    }


class Level(msgspec.Struct, kw_only=True):
    """A number of concurrent closed-loop clients. Latencies are of successful requests, over all rounds."""

    workload: str = "W"
    num_clients: int
    num_requests: int  # successful
    num_errors: int
    qps: float
    max_ms: float
    min_ms: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    first_token_p50_ms: float | None = None  # time to the first text delta of streamed answers
    client_share_of_cores: float
    ceiling_qps: float | None = None
    share_of_ceiling: float | None = None
    speedup: float | None = None  # requests per second over baseline (a)'s


def summarise(
    number: int, samples: Mapping[str, Sequence[float]], num_cores: int, *, workload: str = "W", prefix: str = ""
) -> Level:
    """The row of the level with `number` clients.

    Args:
        prefix: prefix of its samples' names; default: the number of clients.

    Raises:
        StartError: no request was successful.
    """
    prefix = prefix or str(number)
    walls, elapsed_s = samples.get(f"{prefix}.wall", []), sum(samples[f"{prefix}.elapsed"])
    if not walls:
        raise StartError(f"With {number} clients the server answered none of their requests.")
    qps = len(walls) / elapsed_s
    figures = {
        "qps": qps,
        **latency_figures(walls),
        "client_share_of_cores": sum(samples[f"{prefix}.cpu"]) / elapsed_s / num_cores,
    }
    if f"{prefix}.first" in samples:
        figures["first_token_p50_ms"] = percentile(samples[f"{prefix}.first"] or walls, 0.5)
    if workload == "W" and ceiling_series(number) in samples:
        figures["ceiling_qps"] = 1e3 * number / median(samples[ceiling_series(number)])
        figures["share_of_ceiling"] = qps / figures["ceiling_qps"]
    if workload == "W" and "a" in samples:
        figures["speedup"] = qps * median(samples["a"]) / 1e3
    return Level(
        workload=workload,
        num_clients=number,
        num_requests=len(walls),
        num_errors=int(sum(samples[f"{prefix}.errors"])),
        **{name: round(figure, 4) for name, figure in figures.items()},
    )


def ceiling_series(number: int) -> str:
    """The name of the series that times the linear layers of `number` concurrent requests."""
    return f"linears-{number}"


def levels_table(levels: Sequence[Level]) -> Table:
    """Requests per second and latencies by number of clients.

    The first columns are those of Patsnap's post on GPT-2 autocompletion on SageMaker (concurrency, QPS, max, min,
    average).
    """
    table = Table(title="Closed-loop clients through the gateway; latencies in ms")
    headings = (
        *("workload", "clients", "requests/s", "max", "min", "mean", "p50", "p90", "p99", "TTFT p50*", "n", "errors"),
        *("ceiling requests/s", "÷ ceiling", "× baseline (a)", "client CPU"),
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for level in levels:
        percentiles_ms = level.p50_ms, level.p90_ms, level.p99_ms, level.first_token_p50_ms
        times_ms = level.max_ms, level.min_ms, level.mean_ms, *percentiles_ms
        table.add_row(
            level.workload,
            str(level.num_clients),
            format_number(level.qps),
            *map(format_number, times_ms),
            str(level.num_requests),
            str(level.num_errors),
            format_number(level.ceiling_qps),
            format_number(level.share_of_ceiling),
            format_number(level.speedup),
            f"{level.client_share_of_cores:.1%}",
        )
    return table
