"""The rows of `http`, computed from the samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import msgspec

from deploy.load.rounds import percentile
from shared.errors import StartError


class Level(msgspec.Struct, kw_only=True):
    """A number of concurrent closed-loop clients. Latencies are of successful requests, over all rounds."""

    workload: str = "W"
    num_clients: int
    num_requests: int  # successful
    num_errors: int
    qps: float
    tokens_per_s: float
    max_ms: float
    min_ms: float
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    first_token_p50_ms: float | None = None  # time to the first text delta of streamed answers
    client_share_of_cores: float
    ceiling_qps: float | None = None
    share_of_ceiling: float | None = None
    speedup: float | None = None  # requests per second over baseline (a)'s


def summarise(
    number: int, samples: Mapping[str, Sequence[float]], num_cores: int, *, workload: str = "W", prefix: str = ""
) -> Level:
    """The row of the level with `number` clients.

    Args:
        prefix: prefix of its samples' names; default: the number of clients.

    Raises:
        StartError: no request was successful.
    """
    prefix = prefix or str(number)
    walls, elapsed_s = samples.get(f"{prefix}.wall", []), sum(samples[f"{prefix}.elapsed"])
    if not walls:
        raise StartError(f"With {number} clients the server answered none of their requests.")
    qps = len(walls) / elapsed_s
    figures = {
        "qps": qps,
        "tokens_per_s": sum(samples[f"{prefix}.tokens"]) / elapsed_s,
        "max_ms": max(walls),
        "min_ms": min(walls),
        "mean_ms": fmean(walls),
        "p50_ms": percentile(walls, 0.5),
        "p90_ms": percentile(walls, 0.9),
        "p99_ms": percentile(walls, 0.99),
        "client_share_of_cores": sum(samples[f"{prefix}.cpu"]) / elapsed_s / num_cores,
    }
    if f"{prefix}.first" in samples:
        figures["first_token_p50_ms"] = percentile(samples[f"{prefix}.first"] or walls, 0.5)
    if workload == "W" and ceiling_series(number) in samples:
        figures["ceiling_qps"] = 1e3 * number / median(samples[ceiling_series(number)])
        figures["share_of_ceiling"] = qps / figures["ceiling_qps"]
    if workload == "W" and "a" in samples:
        figures["speedup"] = qps * median(samples["a"]) / 1e3
    return Level(
        workload=workload,
        num_clients=number,
        num_requests=len(walls),
        num_errors=int(sum(samples[f"{prefix}.errors"])),
        **{name: round(figure, 4) for name, figure in figures.items()},
    )


def ceiling_series(number: int) -> str:
    """The name of the series that times the linear layers of `number` concurrent requests."""
    return f"linears-{number}"
