"""The GPU rows of `tercet bench engine`. No GPU is needed: the samples are given."""

from __future__ import annotations

import pytest

from deploy.bench.speed.gpu import bandwidth_bound_ms, gpu_row
from deploy.load.rounds import Results

SMALL = {"num_weights": 12 * 12 * 768**2 + 50257 * 768, "n_layer": 12, "n_embd": 768}
SHAPES = {"gpu-small": SMALL, "gpu-crowd": SMALL}


def test_the_bandwidth_bound_of_a_decode_step_is_weights_and_kv_cache_over_bandwidth() -> None:
    """GPT-2 small in bf16 at 3.35 TB/s: 74 µs of weights, and 158 µs of KV cache for 96 sequences of 150 tokens."""
    assert bandwidth_bound_ms(SMALL, 3350, 1, 0) == pytest.approx(0.074, abs=0.0005)
    assert bandwidth_bound_ms(SMALL, 3350, 96, 150) == pytest.approx(0.074 + 0.158, abs=0.001)


def test_a_whole_request_is_compared_with_its_baseline() -> None:
    results = Results({"a-bf16": [100.0, 120.0, 300.0], "static": [30.0], "gateway": [6.0, 5.0, 9.0]})
    rows = [gpu_row(name, results, {}, 3000) for name in ("gpu-request", "gpu-compiled")]
    assert [(row.figure, row.is_met, row.is_goal_met) for row in rows] == [(20, True, False), (5, True, True)]


def test_a_decode_step_is_compared_with_what_it_reads_at_the_measured_bandwidth() -> None:
    """No card's data sheet is consulted: half the bandwidth is twice the bound."""
    results = Results({"gpu-small": [0.151], "gpu-crowd": [0.464]})
    fast, slow = (gpu_row("gpu-small", results, SHAPES, read_gb_s) for read_gb_s in (3350, 1675))
    assert fast.figure is not None
    assert fast.figure == pytest.approx(1.97, abs=0.02)
    assert fast.is_met
    assert slow.figure == pytest.approx(fast.figure / 2, rel=0.001)
    # 96 prompts have 531 MB of keys and values of their own.
    assert gpu_row("gpu-crowd", results, SHAPES, 3350).figure == pytest.approx(2, rel=0.01)


def test_a_row_whose_baseline_failed_has_the_reason() -> None:
    row = gpu_row("gpu-compiled", Results({"gateway": [5.0]}, {"static": "no compiler"}), {}, 3350)
    assert row.figure is None
    assert row.why_not == "static failed: no compiler"
