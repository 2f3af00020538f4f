"""`cost`: what an answer costs the gateway and the workers, in CPU time, and how many answers that allows.

The answers are as small as they get (three completions of one token from the embedded checkpoint), so that Python, HTTP
and the system calls are most of their cost. Another checkout is measured in the same rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from deploy.tuning.load.clients import LOOPBACK
from deploy.tuning.load.server import ROOT
from tests.bench.contender_process import ContenderProcess
from tests.bench.results import Row
from tests.bench.rounds import Contender, interleave
from tests.bench.run import BenchDocument, Options
from tests.bench.server import MeasuredServer
from tests.bench.speed.load_clients import Load

NUM_SLOTS = (1, 2)
NUM_CLIENTS = (4, 16)
SECONDS = 3.0  # per turn
QUICK_SECONDS = 0.3
PREPARED_PER_S = 1000  # requests
PROMPT_TOKENS = 16
PATH = "/autocomplete"
BODY: Mapping[str, Any] = {"n_samples": 3, "length": 1, "clean": False}
HEADINGS = {"gateway": "gateway, ms", "workers": "workers, ms", "answers": "answers/s"}
NOTES = [
    f"An answer: POST {PATH} with {BODY} and --field, a new prompt of {PROMPT_TOKENS} tokens each.",
    "CPU time: user and system time of all threads (/proc/<pid>/stat) of the gateway's and of the workers' processes.",
    "Clients: one thread of another process on the same cores.",
]


class _Version(NamedTuple):
    """A checkout's server."""

    name: str
    num_slots: int
    server: MeasuredServer


class CostBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, against: Path | None, fields: Mapping[str, Any]) -> None:
        """
        Args:
            against: the root of another checkout, measured too.
            fields: fields of each request, besides `BODY` or in their place.
        """
        self._body = {**BODY, **fields}
        self._options = options
        self._roots = {"this": ROOT} | ({"other": against} if against is not None else {})

    def run(self, document: BenchDocument) -> None:
        """
        Raises:
            StartError: a server does not get warm, or a request failed.
        """
        with ExitStack() as stack:
            # Versions take turns at each load.
            versions = [
                _Version(name, num_slots, stack.enter_context(self._server(num_slots, root)))
                for num_slots in NUM_SLOTS
                for name, root in self._roots.items()
            ]
            turns = [self._turn(stack, version, num_clients) for num_clients in NUM_CLIENTS for version in versions]
            results = interleave(turns, self._options.num_rounds)
        document.not_measured |= results.failures
        names = [turn.name.rpartition(".")[0] for turn in turns]
        document.rows = [_row(name, results.samples) for name in names if f"{name}.gateway" in results.samples]
        document.notes += NOTES

    def _server(self, num_slots: int, root: Path) -> MeasuredServer:
        return MeasuredServer(f"{self._options.models}*{num_slots}", self._options.server_settings, root)

    def _turn(self, stack: ExitStack, version: _Version, num_clients: int) -> Contender:
        options = self._options
        seconds = QUICK_SECONDS if options.is_quick else SECONDS
        name = f"{version.name}|{version.num_slots}|{num_clients}"
        server = version.server
        request = PATH, self._body, options.subject(), PROMPT_TOKENS
        process = ContenderProcess(
            "tests.bench.speed.load_clients:LoadClients", LOOPBACK, server.port, *request, server.port + num_clients
        )
        clients = stack.enter_context(process)

        def measure() -> Mapping[str, Sequence[float]]:
            clients.call("prepare", int(PREPARED_PER_S * seconds))
            before_s = server.cpu_s()
            load: Load = clients.call("send_for", num_clients, seconds)
            after_s = server.cpu_s()
            return {
                **{
                    f"{name}.{pool}": [1e3 * (after_s[pool] - before_s[pool]) / load.num_answers]
                    for pool in ("gateway", "workers")
                },
                f"{name}.answers": [load.num_answers / load.elapsed_s],
                f"{name}.clients": [load.client_cpu_s / load.elapsed_s],
            }

        return Contender(
            f"{name}.gateway", f"{version.name}, {version.num_slots} slots, {num_clients} clients", measure
        )


def _row(name: str, samples: Mapping[str, Sequence[float]]) -> Row:
    """Medians over the rounds, of one version at one load, and their ratios to the other checkout."""
    version, num_slots, num_clients = name.split("|")
    other = f"other|{num_slots}|{num_clients}"
    row: Row = {"version": version, "slots": int(num_slots), "clients": int(num_clients)}
    for series, heading in HEADINGS.items():
        row[heading] = ours = median(samples[f"{name}.{series}"])
        if f"{other}.{series}" in samples:
            row[f"÷ other, {series}"] = ours / median(samples[f"{other}.{series}"])
    return row | {"clients' share of a core, %": 100 * median(samples[f"{name}.clients"])}
