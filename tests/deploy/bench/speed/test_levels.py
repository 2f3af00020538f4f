"""The rows of `tercet bench http`, and the servers that it may load."""

from __future__ import annotations

import pytest

from deploy.bench.speed.http import loopback_address
from deploy.bench.speed.levels import ceiling_series, summarise
from shared.errors import StartError


def test_a_level_summarises_its_requests() -> None:
    samples: dict[str, list[float]] = {
        "2.wall": [100.0, 200.0, 300.0], "2.first": [30.0, 40.0, 50.0], "2.tokens": [60, 60, 60], "2.errors": [1, 0],
        "2.elapsed": [1.0, 0.5], "2.cpu": [0.03], "a": [4000.0], ceiling_series(2): [500.0],
    }  # fmt: skip
    level = summarise(2, samples, num_cores=2)
    assert (level.num_requests, level.num_errors, level.qps, level.tokens_per_s) == (3, 1, 2, 120)
    assert (level.max_ms, level.min_ms, level.mean_ms, level.p50_ms, level.p90_ms) == (300, 100, 200, 200, 280)
    assert (level.ceiling_qps, level.share_of_ceiling, level.speedup) == (4, 0.5, 8)
    assert (level.first_token_p50_ms, level.client_share_of_cores) == (40, 0.01)


def test_another_workload_has_neither_ceiling_nor_baseline_nor_streams() -> None:
    samples: dict[str, list[float]] = {
        "patsnap.wall": [100.0], "patsnap.tokens": [400], "patsnap.errors": [0], "patsnap.elapsed": [0.1],
        "patsnap.cpu": [0.0], "a": [4000.0], ceiling_series(1): [500.0],
    }  # fmt: skip
    level = summarise(1, samples, num_cores=2, workload="Patsnap", prefix="patsnap")
    assert (level.workload, level.num_clients, level.qps, level.tokens_per_s) == ("Patsnap", 1, 10, 4000)
    assert (level.ceiling_qps, level.speedup, level.first_token_p50_ms) == (None, None, None)


def test_a_level_without_a_successful_request_is_refused() -> None:
    with pytest.raises(StartError, match="none"):
        summarise(1, {"1.elapsed": [1.0], "1.wall": []}, num_cores=2)


def test_load_stays_on_this_machine() -> None:
    assert loopback_address("http://127.0.0.1:8000") == ("127.0.0.1", 8000)
    assert loopback_address("http://localhost:81/") == ("127.0.0.1", 81)
    assert loopback_address("http://[::1]:81") == ("::1", 81)
    for url in ("http://10.0.0.1:8000", "http://example.com", "https://127.0.0.1", "127.0.0.1:8000"):
        with pytest.raises(StartError, match="this machine only"):
            loopback_address(url)
