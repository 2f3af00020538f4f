"""This checkout against another one: both serve at the same time on one machine and are measured in turns.

Machines drift, so every figure is taken from both versions within seconds, in alternating order, and medians over all
rounds are compared. The other checkout needs `tercet serve` and `POST /autocomplete`, no benchmark of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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


class Version:
    """A checkout with two servers: GPT-2 small's shape, and the embedded checkpoint. A context manager."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stack = ExitStack()

    def __enter__(self) -> Version:
        self._embedded = self._stack.enter_context(Server("embedded", {"devices": "cpu"}, self._root))
        small = self._stack.enter_context(Server("synthetic:small", {"devices": "cpu"}, self._root))
        self._small_clients = _clients(small, "synthetic:small")
        self._embedded_clients = _clients(self._embedded, "embedded")
        self.measure()  # warm-up
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self) -> Mapping[str, list[float]]:
        """One round: samples by series.

        Raises:
            StartError: a request failed.
        """
        replies = raise_for_status(self._small_clients.send_new(NUM_REQUESTS))
        load = self._small_clients.send_concurrently(NUM_CLIENTS, NUM_CLIENT_REQUESTS)
        num_tokens = sum(reply.num_tokens for reply in raise_for_status(load.replies))
        embedded = raise_for_status(self._embedded_clients.send_new(NUM_EMBEDDED_REQUESTS))
        streamed = raise_for_status(self._embedded_clients.send_for(1, STREAM_S, is_streamed=True).replies)
        start_s = self._embedded.renew_worker()
        raise_for_status(self._embedded_clients.send_new(1))  # the new worker's first request
        return {
            "gateway": [reply.wall_ms for reply in replies],
            "overhead": [reply.overhead_ms for reply in replies],
            "clients": [num_tokens / load.elapsed_s],
            "embedded": [reply.wall_ms for reply in embedded],
            "embedded-overhead": [reply.overhead_ms for reply in embedded],
            "first-text": [reply.first_text_ms for reply in streamed],
            "start": [start_s],
        }


def _clients(server: Server, model: str) -> Clients:
    return Clients(LOOPBACK, server.port, Subject.of(resolve(model)), W, server.port, {})


def compare(other: Path, num_rounds: int) -> list[Comparison]:
    """Measure both checkouts in turns.

    Args:
        other: the root of the other checkout.

    Raises:
        StartError: a server does not get warm, or a request failed.
    """
    samples: dict[str, dict[str, list[float]]] = {"ours": {}, "other": {}}
    with Version(ROOT) as ours, Version(other) as theirs:
        order = [("ours", ours), ("other", theirs)]
        for _ in track(range(num_rounds), description="Rounds"):
            order.reverse()  # the version that is measured second finds a CPU that has just been busy
            for name, version in order:
                for key, values in version.measure().items():
                    samples[name].setdefault(key, []).extend(values)
    return [
        Comparison(
            label, unit, median(samples["ours"][key]), median(samples["other"][key]), more_is_better,
            len(samples["ours"][key]),
        )
        for key, (label, unit, more_is_better) in SERIES.items()
    ]  # fmt: skip


def comparison_table(comparisons: Sequence[Comparison], num_rounds: int) -> Table:
    """One row per series."""
    result = Table("series", "other", "this", "this ÷ other", "n", title=f"Medians of {num_rounds} interleaved rounds")
    for row in comparisons:
        is_better = (row.ratio > 1) == row.more_is_better
        result.add_row(
            row.label, f"{row.other:.4g} {row.unit}", f"{row.ours:.4g} {row.unit}",
            f"{row.ratio:.3f} ({'better' if is_better else 'worse'})", str(row.num_samples),
        )  # fmt: skip
    return result
