"""`http`: the real gateway under closed-loop clients, level by level.

Decides which clients run when, and what is computed from their replies. Does not know how a request is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from deploy.tuning.load.clients import LOOPBACK, LoadResult
from deploy.tuning.load.workload import PromptGenerator
from shared.errors import StartError
from tests.bench.contender_process import ContenderProcess
from tests.bench.results import Row
from tests.bench.rounds import Contender, Series, interleave, percent, percentile
from tests.bench.run import BenchDocument, Options
from tests.bench.speed.contenders import BASELINES, Contenders, linear_layers, linear_passes

LEVELS = (1, 2, 3, 4, 8, 16)
SECONDS = 6.0  # per level and round
QUICK_SECONDS = 0.3
STREAMED_SHARE = 0.25  # of SECONDS, for streamed requests after the others
NOTES = [
    "Closed loop: a client sends a request after each response; a turn awaits the requests in flight at its end.",
    "TTFT: time to first token of streamed requests, in turns of their own; the first text delta is a whole word.",
    "Ceiling: requests per second if only the linear layers took time (a prefill per prompt, decode steps batched).",
    "Baseline (a): one process, 3 sequential generate calls, fp32, without HTTP; the same at every level.",
    "Client CPU: share of the cores that the clients used, and the server therefore could not.",
]


class HttpBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, levels: Sequence[int]) -> None:
        """
        Args:
            levels: numbers of concurrent clients.
        """
        self._options, self._levels = options, levels
        self._seconds = QUICK_SECONDS if options.is_quick else SECONDS

    def run(self, document: BenchDocument) -> None:
        if document.device != "cpu":
            document.not_measured["ceiling"] = (
                "on a GPU, kernel launches bound the time of single layers; see `make gpu`"
            )
        with Contenders(self._options) as contenders:
            turns = [*self._start_references(document, contenders), *self._start_clients(document, contenders)]
            results = interleave(turns, self._options.num_rounds)
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

        return [self._level(clients, number) for number in self._levels]

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


def summarise(number: int, samples: Mapping[str, Sequence[float]], num_cores: int) -> Row:
    """The row of the level with `number` clients. Latencies are of successful requests, over all rounds.

    The first columns are those of Patsnap's post on GPT-2 autocompletion on SageMaker (concurrency, QPS, max, min,
    average).

    Raises:
        StartError: no request was successful.
    """
    walls, elapsed_s = samples.get(f"{number}.wall", []), sum(samples[f"{number}.elapsed"])
    if not walls:
        raise StartError(f"With {number} clients the server answered none of their requests.")
    qps, layers = len(walls) / elapsed_s, ceiling_series(number)
    return {
        "clients": number,
        "QPS": qps,
        "max ms": max(walls),
        "min ms": min(walls),
        "average ms": fmean(walls),
        **{f"p{share} ms": percentile(walls, share / 100) for share in (50, 90, 99)},
        "TTFT p50 ms": percentile(samples[f"{number}.first"] or walls, 0.5),
        "n": len(walls),
        "errors": int(sum(samples[f"{number}.errors"])),
        "QPS ÷ QPS of linear layers": qps * median(samples[layers]) / 1e3 / number if layers in samples else None,
        "speedup over (a)": qps * median(samples["a"]) / 1e3 if "a" in samples else None,
        "clients' CPU, % of the cores": percent(sum(samples[f"{number}.cpu"]), elapsed_s * num_cores),
    }


def ceiling_series(number: int) -> str:
    """The name of the series that times the linear layers of `number` concurrent requests."""
    return f"linears-{number}"
