"""`engine --against`: this checkout and another one, which serve at the same time and are measured in turns.

Machines drift, so every figure is taken from both versions within seconds, in alternating order, and medians over all
rounds are compared. The other checkout needs `tercet serve` and `POST /autocomplete`, no benchmark of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track
from rich.table import Table

from deploy.load.clients import LOOPBACK, Clients, raise_for_status
from deploy.load.server import ROOT, Server
from deploy.load.workload import Subject, W
from workers.checkpoints.resolve import resolve

NUM_CLIENTS = 16
# Per round and version.
NUM_REQUESTS, NUM_EMBEDDED_REQUESTS, NUM_CLIENT_REQUESTS = 4, 20, 2
STREAM_S = 0.5
# Series: label, unit, whether more is better.
SERIES = {
    "gateway": ("W through the gateway, cold", "ms", False),
    "overhead": ("gateway and HTTP: request − engine time", "ms", False),
    "clients": (f"{NUM_CLIENTS} closed-loop clients", "tokens/s", True),
    "embedded": ("W through the gateway, cold, embedded checkpoint", "ms", False),
    "embedded-overhead": ("gateway and HTTP, embedded checkpoint", "ms", False),
    "first-text": ("time to first text, embedded checkpoint, streamed", "ms", False),
    "start": ("worker from fork to warm, embedded checkpoint", "s", False),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians of a series over all rounds. `ratio` is this checkout's median divided by the other's."""

    label: str
    unit: str
    ours: float
    other: float
    more_is_better: bool
    num_samples: int

    @property
    def ratio(self) -> float:
        return self.ours / self.other


def compare(other: Path, num_rounds: int) -> list[Comparison]:
    """Measure both checkouts in turns.

    Args:
        other: the root of the other checkout.

    Raises:
        StartError: a server does not get warm, or a request failed.
    """
    samples: dict[str, dict[str, list[float]]] = {"ours": {}, "other": {}}
    with ExitStack() as stack:
        order = [("ours", _start(stack, ROOT)), ("other", _start(stack, other))]
        for _, measure in order:
            measure()  # warm-up
        for _ in track(range(num_rounds), description="Rounds", console=Console(stderr=True)):
            order.reverse()  # the version that is measured second finds a CPU that has just been busy
            for name, measure in order:
                for key, values in measure().items():
                    samples[name].setdefault(key, []).extend(values)
    return [
        Comparison(label, unit, median(samples["ours"][key]), median(samples["other"][key]), is_better, len(values))
        for key, (label, unit, is_better) in SERIES.items()
        for values in [samples["ours"][key]]
    ]


def _start(stack: ExitStack, root: Path) -> Callable[[], Mapping[str, list[float]]]:
    """Start a checkout's servers, GPT-2 small's shape and the embedded checkpoint. The result measures one round."""
    servers, clients = {}, {}
    for model in ("embedded", "synthetic:small"):
        servers[model] = server = stack.enter_context(Server(model, {"devices": "cpu"}, root))
        clients[model] = Clients(LOOPBACK, server.port, Subject.of(resolve(model)), W, server.port, {})

    def measure() -> Mapping[str, list[float]]:
        replies = raise_for_status(clients["synthetic:small"].send_new(NUM_REQUESTS))
        load = clients["synthetic:small"].send_concurrently(NUM_CLIENTS, NUM_CLIENT_REQUESTS)
        num_tokens = sum(reply.num_tokens for reply in raise_for_status(load.replies))
        embedded = raise_for_status(clients["embedded"].send_new(NUM_EMBEDDED_REQUESTS))
        streamed = raise_for_status(clients["embedded"].send_for(1, STREAM_S, is_streamed=True).replies)
        start_s = servers["embedded"].renew_worker()
        raise_for_status(clients["embedded"].send_new(1))  # the new worker's first request
        return {
            "gateway": [reply.wall_ms for reply in replies],
            "overhead": [reply.overhead_ms for reply in replies],
            "clients": [num_tokens / load.elapsed_s],
            "embedded": [reply.wall_ms for reply in embedded],
            "embedded-overhead": [reply.overhead_ms for reply in embedded],
            "first-text": [reply.first_text_ms for reply in streamed],
            "start": [start_s],
        }

    return measure


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One row per series."""
    result = Table("series", "other", "this", "this ÷ other", "n", title="Medians over interleaved rounds")
    for row in comparisons:
        is_better = (row.ratio > 1) == row.more_is_better
        result.add_row(
            *(row.label, f"{row.other:.4g} {row.unit}", f"{row.ours:.4g} {row.unit}"),
            *(f"{row.ratio:.3f} ({'better' if is_better else 'worse'})", str(row.num_samples)),
        )
    return result
