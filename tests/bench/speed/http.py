"""`http`: the real gateway under closed-loop clients, level by level.

Decides which clients run when, and what is computed from their replies. Does not know how a request is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from deploy.load.clients import LOOPBACK, LoadResult
from deploy.load.contender_process import ContenderProcess
from deploy.load.options import Options
from deploy.load.prompts import PromptGenerator
from deploy.load.report import Document
from deploy.load.rounds import Contender, Series, interleave
from deploy.load.run import progress
from tests.bench.speed.contenders import BASELINES, Contenders, linear_layers
from tests.bench.speed.levels import ceiling_series, summarise

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

    def run(self, document: Document) -> None:
        if document.device != "cpu":
            document.not_measured["ceiling"] = (
                "on a GPU, kernel launches bound the time of single layers; see `make gpu`"
            )
        with Contenders(self._options, self._console) as contenders:
            turns = [*self._start_references(document, contenders), *self._start_clients(document, contenders)]
            num_rounds = self._options.num_rounds
            with progress(self._console, "Rounds", (num_rounds + 1) * len(turns)) as turn:
                results = interleave(turns, num_rounds, turn)
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

    def _start_references(self, document: Document, contenders: Contenders) -> list[Contender]:
        """The ceiling of each level, on a CPU, and baseline (a)."""
        options, subject = self._options, self._options.subject()
        turns = []
        if document.device == "cpu":
            passes = {number: options.workload.linear_passes(number) for number in self._levels}
            all_passes = [linear_pass for level_passes in passes.values() for linear_pass in level_passes]
            ceiling, document.ceiling = contenders.start_ceiling(subject, all_passes)
            turns += [
                linear_layers(ceiling, ceiling_series(number), f"linear layers of {number} requests", level_passes, 1)
                for number, level_passes in passes.items()
            ]
        prompts = PromptGenerator(subject.tokenizer(), options.seed)
        return turns + contenders.start_baselines(["a"], subject, prompts)

    def _start_clients(self, document: Document, contenders: Contenders) -> list[Contender]:
        options = self._options
        server = contenders.start_server(options.models)
        document.settings |= server.in_effect()
        clients = contenders.start_clients((LOOPBACK, server.port), options.subject(), options.seed)
        return [*(self._level(clients, number) for number in self._levels), self._patsnap(clients)]

    def _level(self, clients: ContenderProcess, number: int) -> Contender:
        def measure() -> Mapping[str, Sequence[float]]:
            seconds = QUICK_SECONDS if self._options.is_quick else SECONDS
            load: LoadResult = clients.call("send_for", number, seconds)
            answered = [reply for reply in load.replies if reply.status == 200]
            streamed: LoadResult = clients.call("send_for", number, STREAMED_SHARE * seconds, True)
            return {
                f"{number}.wall": [reply.wall_ms for reply in answered],
                f"{number}.first": [reply.first_text_ms for reply in streamed.replies if reply.status == 200],
                f"{number}.tokens": [reply.num_tokens for reply in answered],
                f"{number}.errors": [len(load.replies) - len(answered)],
                f"{number}.elapsed": [load.elapsed_s],
                f"{number}.cpu": [load.client_cpu_s],
            }

        return Contender(f"{number}.wall", f"{number} clients", measure)

    def _patsnap(self, clients: ContenderProcess) -> Contender:
        def measure() -> Mapping[str, Sequence[float]]:
            load: LoadResult = clients.call("send_batches_for", QUICK_SECONDS if self._options.is_quick else SECONDS)
            answered = [reply for reply in load.replies if reply.status == 200]
            return {
                "patsnap.wall": [reply.wall_ms for reply in answered],
                "patsnap.tokens": [reply.num_tokens for reply in answered],
                "patsnap.errors": [len(load.replies) - len(answered)],
                "patsnap.elapsed": [load.elapsed_s],
                "patsnap.cpu": [load.client_cpu_s],
            }

        return Contender("patsnap.wall", "Patsnap's workload", measure)
