"""Measurements of machines that follow a formula, for tests of what is decided on figures."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.tuning.tune.results import MIB, Candidate, Figures, Load, Measurement

CLIENTS = (1, 2, 4, 8)


def figures(load: Load, qps: float, mean_ms: float, num_errors: int = 0) -> Figures:
    return Figures(
        load, 100, num_errors, round(qps, 3), 2 * mean_ms, mean_ms / 2, mean_ms, mean_ms, mean_ms, 2 * mean_ms, 0.1
    )


def closed_loops(response_ms: Sequence[float]) -> tuple[Figures, ...]:
    """Closed loops of 1, 2, 4 and 8 clients with these average latencies."""
    return tuple(
        figures(Load(clients=number), 1e3 * number / mean_ms, mean_ms)
        for number, mean_ms in zip(CLIENTS, response_ms, strict=True)
    )


def measurement(
    response_ms: Sequence[float] = (50, 60, 100, 200),
    worker_mib: float = 500,
    num_workers: int = 1,
    at_load: Figures | None = None,
) -> Measurement:
    worker_bytes = int(worker_mib * MIB)
    rows = (*closed_loops(response_ms), *([] if at_load is None else [at_load]))
    return Measurement(3.0, worker_bytes, 200 * MIB + num_workers * worker_bytes, rows)


def at_load(mean_ms: float, qps: float = 25.0, num_errors: int = 0) -> Figures:
    """An open loop."""
    return figures(Load(rate_qps=qps), qps, mean_ms, num_errors)


def candidate(workers: int = 1, threads: int = 1, max_batch: int = 48) -> Candidate:
    return Candidate(("cpu",), workers, threads, max_batch, "auto")
