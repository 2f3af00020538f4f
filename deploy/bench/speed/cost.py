"""`tercet bench cost`: what an answer costs the gateway and the workers, in CPU time, and how many answers that allows.

The answers are as small as they get (three completions of one token from the embedded checkpoint), so that Python, HTTP
and the system calls are most of their cost. Another checkout is measured in the same rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.harness.load import Load
from deploy.load.clients import LOOPBACK
from deploy.load.contender_process import ContenderProcess
from deploy.load.options import Options
from deploy.load.report import Document, format_number
from deploy.load.rounds import Contender, interleave
from deploy.load.run import progress
from deploy.load.server import ROOT, Server

NUM_SLOTS = (1, 2)
NUM_CLIENTS = (4, 16)
SECONDS = 3.0  # per turn
QUICK_SECONDS = 0.3
PREPARED_PER_S = 1000  # requests
PROMPT_TOKENS = 16
PATH = "/autocomplete"
BODY: Mapping[str, Any] = {"n_samples": 3, "length": 1, "clean": False}
THIS, OTHER = "this", "other"
NOTES = [
    f"An answer: POST {PATH} with {BODY}, a new prompt of {PROMPT_TOKENS} tokens each.",
    "CPU time: user and system time of all threads (/proc/<pid>/stat) of the gateway's and of the workers' processes.",
    "Clients: one thread of another process on the same cores.",
]


class Cost(msgspec.Struct, frozen=True):
    """Medians over the rounds, of one checkout at one load."""

    version: str
    num_slots: int
    num_clients: int
    gateway_ms: float  # CPU time per answer
    workers_ms: float  # of all workers together
    answers_per_s: float
    clients_share: float  # of one core, which the clients used


class CostBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, against: Path | None, console: Console) -> None:
        """
        Args:
            against: the root of another checkout; None: this one alone.
        """
        self._options = options
        self._roots = {THIS: ROOT} if against is None else {THIS: ROOT, OTHER: against}
        self._console = console

    def run(self, document: Document) -> None:
        """
        Raises:
            StartError: a server does not get warm, or a request failed.
        """
        options = self._options
        with ExitStack() as stack:
            # Versions take turns at each load.
            servers = [
                (version, num_slots, stack.enter_context(Server(f"{options.models}*{num_slots}", settings, root)))
                for num_slots in NUM_SLOTS
                for version, root in self._roots.items()
                for settings in [options.server_settings]
            ]
            turns = [
                self._turn(stack, version, num_slots, num_clients, server)
                for num_clients in NUM_CLIENTS
                for version, num_slots, server in servers
            ]
            with progress(self._console, "Rounds", (options.num_rounds + 1) * len(turns)) as on_turn:
                results = interleave(turns, options.num_rounds, on_turn)
        document.not_measured |= results.failures
        names = [turn.name.rpartition(".")[0] for turn in turns]
        document.rows = [_cost(name, results.samples) for name in names if f"{name}.gateway" in results.samples]
        document.notes += NOTES

    def _turn(self, stack: ExitStack, version: str, num_slots: int, num_clients: int, server: Server) -> Contender:
        options = self._options
        seconds = QUICK_SECONDS if options.is_quick else SECONDS
        name = f"{version}.{num_slots}.{num_clients}"
        clients = stack.enter_context(
            ContenderProcess(
                "deploy.bench.harness.load:LoadClients",
                LOOPBACK, server.port, PATH, BODY, options.subject(), PROMPT_TOKENS, server.port + num_clients,
            )
        )  # fmt: skip

        def measure() -> Mapping[str, Sequence[float]]:
            clients.call("prepare", int(PREPARED_PER_S * seconds))
            before = server.cpu_s()
            load: Load = clients.call("send_for", num_clients, seconds)
            used = {role: after - before[role] for role, after in server.cpu_s().items()}
            return {
                f"{name}.gateway": [1e3 * used["gateway"] / load.num_answers],
                f"{name}.workers": [1e3 * used["workers"] / load.num_answers],
                f"{name}.answers": [load.num_answers / load.elapsed_s],
                f"{name}.clients": [load.client_cpu_s / load.elapsed_s],
            }

        return Contender(f"{name}.gateway", f"{version} checkout, {num_slots} slots, {num_clients} clients", measure)


def cost_table(costs: Sequence[Cost]) -> Table:
    """One row per load and checkout; ratios to the other checkout, if there is one."""
    table = Table(title="CPU time per answer, and answers per second")
    headings = ("slots", "clients", "gateway, ms", "", "workers, ms", "", "answers/s", "", "clients' share of a core")
    for heading in ("checkout", *headings):
        table.add_column(heading, justify="right" if heading != "checkout" else "left")
    others = {(cost.num_slots, cost.num_clients): cost for cost in costs if cost.version == OTHER}
    for cost in sorted(costs, key=lambda cost: (cost.num_slots, cost.num_clients, cost.version)):
        other = others.get((cost.num_slots, cost.num_clients), cost)
        table.add_row(
            cost.version, str(cost.num_slots), str(cost.num_clients),
            format_number(cost.gateway_ms), _ratio(cost.gateway_ms, other.gateway_ms, cost is other),
            format_number(cost.workers_ms), _ratio(cost.workers_ms, other.workers_ms, cost is other),
            format_number(cost.answers_per_s), _ratio(cost.answers_per_s, other.answers_per_s, cost is other),
            f"{cost.clients_share:.0%}",
        )  # fmt: skip
    return table


def _ratio(ours: float, other: float, is_same: bool) -> str:
    return "" if is_same else f"{ours / other:.2f}×"


def _cost(name: str, samples: Mapping[str, Sequence[float]]) -> Cost:
    version, num_slots, num_clients = name.split(".")
    gateway_ms, workers_ms, answers, share = (
        round(median(samples[f"{name}.{series}"]), 3) for series in ("gateway", "workers", "answers", "clients")
    )
    return Cost(version, int(num_slots), int(num_clients), gateway_ms, workers_ms, answers, share)
