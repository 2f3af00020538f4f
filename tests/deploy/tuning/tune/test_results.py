"""Figures from replies, and medians of rounds."""

from __future__ import annotations

import pytest

from deploy.tuning.load.clients import LoadResult, Reply
from deploy.tuning.tune.results import MIB, Candidate, Figures, Load, medians, merged
from shared.errors import StartError
from tests.deploy.tuning.tune.figures import figures, measurement


def test_figures_are_of_answered_requests() -> None:
    replies = [Reply(200, float(ms)) for ms in (10, 20, 30, 40)] + [Reply(503, 1.0), Reply(0, 2.0)]
    found = Figures.of(Load(clients=2), LoadResult(replies, elapsed_s=2.0, client_cpu_s=0.5))
    assert (found.num_requests, found.num_errors, found.qps, found.client_cpu_s) == (4, 2, 2.0, 0.25)
    assert (found.min_ms, found.mean_ms, found.p50_ms, found.p90_ms, found.max_ms) == (10, 25, 25, 37, 40)
    with pytest.raises(StartError, match="3/s, Poisson"):
        Figures.of(Load(rate_qps=3), LoadResult([Reply(503, 1.0)], 1.0, 0.1))


def test_passes_are_merged_by_the_median_of_each_figure_and_all_errors() -> None:
    load = Load(clients=1)
    found = medians([figures(load, 10, 300, num_errors=1), figures(load, 30, 100), figures(load, 20, 900, 2)])
    assert (found.qps, found.mean_ms, found.num_errors, found.num_requests) == (20, 300, 3, 300)
    passes = [measurement((ms, ms, ms, ms), mib) for ms, mib in ((9, 1), (5, 3), (1, 2))]
    both = merged(passes)
    assert [(row.mean_ms, row.load) for row in both.figures] == [(5, row.load) for row in passes[0].figures]
    assert both.worker_bytes == 3 * MIB


def test_a_candidates_settings_and_name() -> None:
    on_cpu, on_gpus = Candidate(("cpu",), 2, 1, 48, "auto"), Candidate(("cuda:0", "cuda:1"), 1, 0, 24, "spread")
    assert on_cpu.settings() == {"devices": "cpu", "cpu_threads": "1", "max_batch": "48", "placement": "auto"}
    assert on_gpus.settings() == {"devices": "cuda:0,cuda:1", "max_batch": "24", "placement": "spread"}
    assert str(on_cpu) == "2 workers × 1 thread, batch 48, auto"
    assert str(on_gpus) == "1 worker on each of 2 devices, batch 24, spread"
    assert on_gpus.num_workers == 2
