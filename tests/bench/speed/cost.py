"""`cost`: what an answer costs the gateway and the workers, in CPU time, and how many answers that allows.

The answers are as small as they get (three completions of one token from the embedded checkpoint), so that Python, HTTP
and the system calls are most of their cost. Another checkout, or the ways from a gateway to its workers (Unix socket,
TCP, TLS), are measured in the same rounds.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.load.clients import LOOPBACK
from deploy.load.server import ROOT, free_port
from tests.bench.contender_process import ContenderProcess
from tests.bench.rounds import Contender, interleave
from tests.bench.run import BenchDocument, Options, format_number
from tests.bench.server import MeasuredServer
from tests.bench.speed.load_clients import Load
from tests.tls import Certificate

NUM_SLOTS = (1, 2)
NUM_CLIENTS = (4, 16)
SECONDS = 3.0  # per turn
QUICK_SECONDS = 0.3
PREPARED_PER_S = 1000  # requests
SHARED_BATCH = 2 * 3 * max(NUM_CLIENTS)  # two gateways share the workers: each may use half of their batch
PROMPT_TOKENS = 16
PATH = "/autocomplete"
BODY: Mapping[str, Any] = {"n_samples": 3, "length": 1, "clean": False}
THIS, OTHER, UNIX_SOCKET = "this", "other", "Unix socket"
NOTES = [
    f"An answer: POST {PATH} with {BODY}, a new prompt of {PROMPT_TOKENS} tokens each.",
    "CPU time: user and system time of all threads (/proc/<pid>/stat) of the gateway's and of the workers' processes.",
    "Clients: one thread of another process on the same cores.",
]


class Cost(msgspec.Struct, frozen=True):
    """Medians over the rounds, of one version at one load."""

    version: str
    num_slots: int
    num_clients: int
    gateway_ms: float  # CPU time per answer
    workers_ms: float  # of all workers together
    answers_per_s: float
    clients_share: float  # of one core, which the clients used


@dataclass(frozen=True, slots=True)
class _Version:
    """A gateway to measure, and the server that runs its workers."""

    name: str
    num_slots: int
    gateway: MeasuredServer
    workers: MeasuredServer


class CostBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, console: Console, *, against: Path | None, is_remote: bool) -> None:
        """
        Args:
            against: the root of another checkout, measured too.
            is_remote: measure the ways to the workers instead, with one slot: Unix socket, TCP and TLS.
        """
        self._options, self._console, self._against, self._is_remote = options, console, against, is_remote

    def run(self, document: BenchDocument) -> None:
        """
        Raises:
            StartError: a server does not get warm, or a request failed.
        """
        with ExitStack() as stack:
            # Versions take turns at each load.
            versions = list(self._start_ways(stack) if self._is_remote else self._start_checkouts(stack))
            turns = [self._turn(stack, version, num_clients) for num_clients in NUM_CLIENTS for version in versions]
            results = interleave(turns, self._options.num_rounds, self._console)
        document.not_measured |= results.failures
        names = [turn.name.rpartition(".")[0] for turn in turns]
        document.rows = [_cost(name, results.samples) for name in names if f"{name}.gateway" in results.samples]
        document.notes += NOTES

    def _start_checkouts(self, stack: ExitStack) -> Iterator[_Version]:
        options = self._options
        roots = {THIS: ROOT} | ({OTHER: self._against} if self._against is not None else {})
        for num_slots in NUM_SLOTS:
            for name, root in roots.items():
                server = stack.enter_context(
                    MeasuredServer(f"{options.models}*{num_slots}", options.server_settings, root)
                )
                yield _Version(name, num_slots, server, server)

    def _start_ways(self, stack: ExitStack) -> Iterator[_Version]:
        """Workers that listen on TCP and workers that listen on TLS, and a gateway for each way to them."""
        model = self._options.models
        settings = {**self._options.server_settings, "max_batch": str(SHARED_BATCH)}
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tercet-bench-")))
        key = directory / "key"
        key.touch(0o600)
        key.write_text(f"{secrets.token_hex(32)}\n")
        certificate, authority = Certificate(directory), directory / "ca.crt"
        authority.write_bytes(certificate.authority_pem)
        tls = {f"pool_{name}": path for name, path in certificate.settings.items()}
        for name, scheme, worker_files, gateway_files in (
            ("TCP", "http", {}, {}),
            ("TLS", "https", tls, {"pool_ca": str(authority)}),
        ):
            bind = f"{LOOPBACK}:{free_port()}"
            shared = {**settings, "pool_key": str(key)}
            workers = stack.enter_context(MeasuredServer(model, {**shared, "pool_bind": bind, **worker_files}))
            if name == "TCP":  # the gateway beside them has the Unix socket
                yield _Version(UNIX_SOCKET, 1, workers, workers)
            remote = {**shared, "pool": f"{model}={scheme}://{bind}", **gateway_files}
            yield _Version(name, 1, stack.enter_context(MeasuredServer("", remote, role="gateway")), workers)

    def _turn(self, stack: ExitStack, version: _Version, num_clients: int) -> Contender:
        options = self._options
        seconds = QUICK_SECONDS if options.is_quick else SECONDS
        name = f"{version.name}|{version.num_slots}|{num_clients}"
        gateway, workers = version.gateway, version.workers
        request = PATH, BODY, options.subject(), PROMPT_TOKENS
        process = ContenderProcess(
            "tests.bench.speed.load_clients:LoadClients", LOOPBACK, gateway.port, *request, gateway.port + num_clients
        )
        clients = stack.enter_context(process)

        def measure() -> Mapping[str, Sequence[float]]:
            clients.call("prepare", int(PREPARED_PER_S * seconds))
            gateway_s, workers_s = gateway.cpu_s()["gateway"], workers.cpu_s()["workers"]
            load: Load = clients.call("send_for", num_clients, seconds)
            gateway_s, workers_s = gateway.cpu_s()["gateway"] - gateway_s, workers.cpu_s()["workers"] - workers_s
            return {
                f"{name}.gateway": [1e3 * gateway_s / load.num_answers],
                f"{name}.workers": [1e3 * workers_s / load.num_answers],
                f"{name}.answers": [load.num_answers / load.elapsed_s],
                f"{name}.clients": [load.client_cpu_s / load.elapsed_s],
            }

        return Contender(
            f"{name}.gateway", f"{version.name}, {version.num_slots} slots, {num_clients} clients", measure
        )


def cost_table(costs: Sequence[Cost]) -> Table:
    """One row per load and version, with ratios to the other checkout or to the Unix socket, if there is one."""
    table = Table(title="CPU time per answer, and answers per second")
    headings = ("slots", "clients", "gateway, ms", "", "workers, ms", "", "answers/s", "", "clients' share of a core")
    for heading in ("version", *headings):
        table.add_column(heading, justify="right" if heading != "version" else "left")
    references = {(cost.num_slots, cost.num_clients): cost for cost in costs if cost.version in (OTHER, UNIX_SOCKET)}
    for cost in sorted(costs, key=lambda cost: (cost.num_slots, cost.num_clients)):
        reference = references.get((cost.num_slots, cost.num_clients), cost)
        cells = [cost.version, str(cost.num_slots), str(cost.num_clients)]
        for name in ("gateway_ms", "workers_ms", "answers_per_s"):
            ours, other = getattr(cost, name), getattr(reference, name)
            cells += [format_number(ours), "" if cost is reference else f"{ours / other:.2f}×"]
        table.add_row(*cells, f"{cost.clients_share:.0%}")
    return table


def _cost(name: str, samples: Mapping[str, Sequence[float]]) -> Cost:
    version, num_slots, num_clients = name.split("|")
    middle = (round(median(samples[f"{name}.{series}"]), 3) for series in ("gateway", "workers", "answers", "clients"))
    return Cost(version, int(num_slots), int(num_clients), *middle)
