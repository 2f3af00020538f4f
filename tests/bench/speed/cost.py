"""`cost`: what an answer costs the gateway and the workers, in CPU time, and how many answers that allows.

The answers are as small as they get (three completions of one token from the embedded checkpoint), so that Python, HTTP
and the system calls are most of their cost. Another checkout is measured in the same rounds. Each turn starts a server:
from start to start the same code takes up to a tenth more or less, in its gateway and its workers alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

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
SECONDS = 3.0  # per load
WARMING_S = 1.0
QUICK_SECONDS = 0.3
PREPARED_PER_S = 1000  # requests
PROMPT_TOKENS = 16
CLIENTS = "tests.bench.speed.load_clients:LoadClients"
PATH = "/autocomplete"
BODY: Mapping[str, Any] = {"n_samples": 3, "length": 1, "clean": False}
HEADINGS = {"gateway": "gateway, ms", "workers": "workers, ms", "answers": "answers/s"}
NOTES = [
    f"An answer: POST {PATH} with {BODY} and --field, a new prompt of {PROMPT_TOKENS} tokens each.",
    "CPU time: user and system time of all threads (/proc/<pid>/stat) of the gateway's and of the workers' processes.",
    "Clients: one thread of another process on the same cores.",
]


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
        turns = [self._turn(name, root, num_slots) for num_slots in NUM_SLOTS for name, root in self._roots.items()]
        results = interleave(turns, self._options.num_rounds)
        document.not_measured |= results.failures
        names = [f"{name}|{slots}|{clients}" for clients in NUM_CLIENTS for slots in NUM_SLOTS for name in self._roots]
        document.rows = [_row(name, results.samples) for name in names if f"{name}.gateway" in results.samples]
        document.notes += NOTES

    def _turn(self, version: str, root: Path, num_slots: int) -> Contender:
        options = self._options
        request = PATH, self._body, options.subject(), PROMPT_TOKENS

        def measure() -> Mapping[str, Sequence[float]]:
            models = f"{options.models}*{num_slots}"
            with (
                MeasuredServer(models, options.server_settings, root) as server,
                ContenderProcess(CLIENTS, LOOPBACK, server.port, *request, server.port) as clients,
            ):
                self._load(server, clients, max(NUM_CLIENTS), WARMING_S)
                return {
                    f"{version}|{num_slots}|{number}.{series}": [value]
                    for number in NUM_CLIENTS
                    for series, value in self._load(server, clients, number, SECONDS).items()
                }

        first = f"{version}|{num_slots}|{NUM_CLIENTS[0]}.gateway"
        return Contender(first, f"{version}, {num_slots} slots", measure)

    def _load(
        self, server: MeasuredServer, clients: ContenderProcess, num_clients: int, seconds: float
    ) -> Mapping[str, float]:
        """An answer's CPU time in each pool in milliseconds, the answers a second, the clients' share of a core."""
        seconds = QUICK_SECONDS if self._options.is_quick else seconds
        clients.call("prepare", int(PREPARED_PER_S * seconds))
        before_s = server.cpu_s()
        load: Load = clients.call("send_for", num_clients, seconds)
        after_s = server.cpu_s()
        return {
            **{pool: 1e3 * (after_s[pool] - before_s[pool]) / load.num_answers for pool in ("gateway", "workers")},
            "answers": load.num_answers / load.elapsed_s,
            "clients": load.client_cpu_s / load.elapsed_s,
        }


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
