"""`tercet bench http`: the real gateway under closed-loop clients, level by level: the table of the Patsnap post.

Decides who asks when and what is made of the answers. Refuses to know how a request is sent.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from deploy.bench.harness.clients import LOOPBACK, Crowd
from deploy.bench.harness.contender_process import ContenderProcess
from deploy.bench.harness.levels import ceiling_series, summarise
from deploy.bench.harness.options import Options, progress
from deploy.bench.harness.report import Document, print_bandwidth
from deploy.bench.harness.rounds import Contender, Series, interleave
from deploy.bench.harness.server import Server, ready_page
from deploy.bench.harness.workload import BASELINES, Subject, Writer
from shared.errors import StartError
from workers.checkpoints.resolve import resolve

LEVELS = (1, 2, 3, 4, 8, 16)
SECONDS = 6.0  # of one level in one round
QUICK_SECONDS = 0.3
STREAMED_SHARE = 0.25  # as long again, for the time to the first text
NOTES = [
    "Closed loop: a client asks again as soon as it is answered; what is under way when a turn ends is waited for.",
    "* of streamed answers, in a turn of their own at each level; the first text is a whole word.",
    "QPS ceiling: if nothing but the linear layers took time (each prompt by itself, all decode steps together).",
    "The seed: one process with three sequential generate calls, fp32; without HTTP, the same at any level.",
    "Clients' cost: their process's share of the cores, which the server could have used.",
]


class HttpBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, levels: Sequence[int], url: str | None, console: Console) -> None:
        """
        Args:
            url: of a running server on this machine; None for one of our own.

        Raises:
            StartError: the URL is not one on the loopback.
        """
        self._options = options
        self._levels = levels
        self._address = None if url is None else loopback_address(url)
        self._console = console
        self._stack = ExitStack()

    def run(self, document: Document) -> None:
        with self._stack:
            contenders = [*self._comparisons(document), *self._clients(document)]
            num_rounds = self._options.num_rounds
            with progress(self._console, "Rounds", (num_rounds + 1) * len(contenders)) as turn:
                results = interleave(contenders, num_rounds, turn)
        samples = results.samples
        document.not_measured |= results.failures
        labels = {"a": BASELINES["a"]} | {ceiling_series(n): f"ceiling: linear layers of {n} × W" for n in self._levels}
        document.series = {
            name: Series.of(label, "ms", samples[name]) for name, label in labels.items() if name in samples
        }
        num_cores = self._options.num_threads
        document.rows = [
            summarise(number, samples, num_cores) for number in self._levels if f"{number}.wall" in samples
        ]
        document.notes += NOTES

    def _comparisons(self, document: Document) -> list[Contender]:
        """The linear layers of each level's requests, and the seed; with a reason where they cannot be had."""
        if self._address is not None:
            self._look_at_server(document)
        if document.device != "cpu":
            why_not = "on a GPU single layers are bound by their launches; see `tercet bench engine --device cuda`"
            document.not_measured["ceiling"] = why_not
        if "model" in document.not_measured:
            return []
        options, subject = self._options, self._options.subject()
        contenders = []
        if document.device == "cpu":
            with self._console.status("Ceiling: memory and matrix kernels …"):
                ceiling = self._start("speed.ceiling:Ceiling", subject, "cpu", options.num_threads)
                document.ceiling = ceiling.call("bandwidth", 1 << (27 if options.is_quick else 30))
                print_bandwidth(self._console, document.ceiling)
                passes = [one for number in self._levels for one in options.workload.passes(number)]
                rows = sorted({rows for one in passes for rows in (one.rows, one.head_rows)})
                document.ceiling["kernels_ms"] = ceiling.call("choose", rows, 1 if options.is_quick else 5)
                document.ceiling["chosen"] = ceiling.call("chosen")
            contenders += [self._linears(ceiling, number) for number in self._levels]
        writer = Writer(subject.tokenizer(), options.seed)
        child = self._start("speed.baselines:Baselines", subject, options.workload, options.device, options.num_threads)
        num_tokens = options.workload.num_prompt_tokens
        return [
            *contenders,
            Contender("a", BASELINES["a"], lambda: {"a": [child.call("run", "a", writer.ids(num_tokens))]}),
        ]

    def _linears(self, ceiling: ContenderProcess, number: int) -> Contender:
        name, passes = ceiling_series(number), self._options.workload.passes(number)
        label = f"linear layers of {number} requests"
        return Contender(name, label, lambda: {name: ceiling.call("run", passes, 1)})

    def _clients(self, document: Document) -> list[Contender]:
        options = self._options
        more: dict[str, Any] = {}
        subject = Subject.of(resolve("embedded"))  # for its words, if the server's own are not known
        if self._address is not None:
            host, port = self._address
        else:
            with self._console.status("Starting a server to measure …"):
                server = self._stack.enter_context(Server(options.models, options.server_settings))
            host, port = LOOPBACK, server.port
            document.settings["dtype in effect"] = server.slots()[0]["dtype"]
        if "model" in document.not_measured:
            more["max_tokens"] = options.workload.num_prompt_tokens
        else:
            subject = options.subject()
        child = self._start("harness.clients:Clients", host, port, subject, options.workload, options.seed, more)
        return [self._level(child, number) for number in self._levels]

    def _level(self, child: ContenderProcess, number: int) -> Contender:
        def measure() -> Mapping[str, Sequence[float]]:
            seconds = QUICK_SECONDS if self._options.is_quick else SECONDS
            crowd: Crowd = child.call("loop", number, seconds)
            good = [reply for reply in crowd.replies if reply.status == 200]
            streamed: Crowd = child.call("loop", number, STREAMED_SHARE * seconds, True)
            return {
                f"{number}.wall": [reply.wall_ms for reply in good],
                f"{number}.first": [reply.first_text_ms for reply in streamed.replies if reply.status == 200],
                f"{number}.tokens": [reply.num_tokens for reply in good],
                f"{number}.errors": [len(crowd.replies) - len(good)],
                f"{number}.elapsed": [crowd.elapsed_s],
                f"{number}.cpu": [crowd.client_cpu_s],
            }

        return Contender(f"{number}.wall", f"{number} clients", measure)

    def _look_at_server(self, document: Document) -> None:
        """Take the model and the device from a running server; say so where the model is not one we can make."""
        assert self._address is not None
        host, port = self._address
        with httpx.Client(base_url=f"http://{host}:{port}", trust_env=False, timeout=10) as client:
            page = ready_page(client)
        if page.get("status") != "ready":
            raise StartError(f"No server that is ready answers at {host}:{port}: start it with `tercet serve`.")
        model, slot = page["models"][0], page["slots"][0]
        document.model = model["model"]
        document.device = "cpu" if slot["device"] == "cpu" else "cuda"
        document.settings = {"dtype in effect": slot["dtype"], "workers": str(len(page["slots"]))}
        self._options = dataclasses.replace(self._options, models=model["model"], device=document.device)
        if model["source"] not in {"embedded", "synthetic"}:
            document.not_measured["model"] = (
                f"the server's {model['model']} is its own: neither the ceiling nor the seed can be measured for it"
            )

    def _start(self, factory: str, *args: Any) -> ContenderProcess:
        return self._stack.enter_context(ContenderProcess(f"deploy.bench.{factory}", *args))


def loopback_address(url: str) -> tuple[str, int]:
    """
    Raises:
        StartError: traffic to it would leave this machine, or it is no http URL.
    """
    parts = urlsplit(url)
    host = {"localhost": LOOPBACK}.get(parts.hostname or "", parts.hostname or "")
    try:
        if parts.scheme == "http" and ipaddress.ip_address(host).is_loopback:
            return host, parts.port or 80
    except ValueError:
        pass
    raise StartError(
        f"--url {url}: a bench sends to this machine only; give an http:// URL of 127.0.0.1 with its port."
    )
