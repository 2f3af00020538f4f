"""`engine --against`: this checkout and another one, which serve at the same time and are measured in turns.

Machines drift, so every figure is taken from both versions within seconds, in alternating order, and medians over all
rounds are compared. The other checkout needs `tercet serve` and `POST /autocomplete`, no benchmark of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from deploy.tuning.load.clients import LOOPBACK, Clients
from deploy.tuning.load.server import ROOT
from deploy.tuning.load.workload import W
from shared.errors import StartError
from tests.bench.results import Row
from tests.bench.rounds import Contender, interleave, raise_for_status
from tests.bench.server import MeasuredServer
from workers.checkpoints.resolve import resolve

NUM_CLIENTS = 16
# Per round and version.
NUM_REQUESTS, NUM_EMBEDDED_REQUESTS, NUM_CLIENT_REQUESTS = 4, 20, 2
STREAM_S = 0.5
# Series: label, unit.
SERIES = {
    "gateway": ("W through the gateway, cold", "ms"),
    "clients": (f"{NUM_CLIENTS} closed-loop clients", "tokens/s"),
    "embedded": ("W through the gateway, cold, embedded checkpoint", "ms"),
    "first-text": ("time to first text, embedded checkpoint, streamed", "ms"),
    "start": ("worker from fork to warm, embedded checkpoint", "s"),
}


def compare(other: Path, num_rounds: int) -> Iterator[Row]:
    """Measure both checkouts in turns: the median of each series over all rounds.

    Args:
        other: the root of the other checkout.

    Raises:
        StartError: a server does not get warm, or a request failed.
    """
    with ExitStack() as stack:
        contenders = [_start(stack, name, root) for name, root in (("ours", ROOT), ("other", other))]
        results = interleave(contenders, num_rounds)
    for name, reason in results.failures.items():
        raise StartError(f"{name}: {reason}")
    for key, (label, unit) in SERIES.items():
        samples = results.samples[f"ours {key}"]
        ours, theirs = median(samples), median(results.samples[f"other {key}"])
        yield {
            "series": label,
            "other": f"{theirs:.4g} {unit}",
            "this": f"{ours:.4g} {unit}",
            "this ÷ other": f"{ours / theirs:.3f}",
            "n": len(samples),
        }


def _start(stack: ExitStack, name: str, root: Path) -> Contender:
    """Start a checkout's servers, GPT-2 small's shape and the embedded checkpoint."""
    servers, clients = {}, {}
    for model in ("embedded", "synthetic:small"):
        servers[model] = server = stack.enter_context(MeasuredServer(model, {"devices": "cpu"}, root))
        clients[model] = Clients(LOOPBACK, server.port, resolve(model), W, server.port)

    def measure() -> Mapping[str, list[float]]:
        replies = raise_for_status(clients["synthetic:small"].send_new(NUM_REQUESTS))
        load = clients["synthetic:small"].send_concurrently(NUM_CLIENTS, NUM_CLIENT_REQUESTS)
        num_tokens = sum(reply.num_tokens for reply in raise_for_status(load.replies))
        embedded = raise_for_status(clients["embedded"].send_new(NUM_EMBEDDED_REQUESTS))
        streamed = raise_for_status(clients["embedded"].send_for(1, STREAM_S, is_streamed=True).replies)
        start_s = servers["embedded"].renew_worker()
        raise_for_status(clients["embedded"].send_new(1))  # the new worker's first request
        samples = {
            "gateway": [reply.wall_ms for reply in replies],
            "clients": [num_tokens / load.elapsed_s],
            "embedded": [reply.wall_ms for reply in embedded],
            "first-text": [reply.first_text_ms for reply in streamed],
            "start": [start_s],
        }
        return {f"{name} {key}": values for key, values in samples.items()}

    return Contender(name, name, measure)
