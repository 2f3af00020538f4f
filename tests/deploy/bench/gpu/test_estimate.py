"""The model of a step on paper, against figures that were computed separately."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.bench.gpu.estimate import CARDS, FIVE, SEVEN, estimate_markdown, kv_bytes, step_estimate, weight_bytes
from workers.engine.model.gpt2 import SHAPES

SMALL, MEDIUM = SHAPES["small"], SHAPES["medium"]
H100_GB_S = 3350
PERFORMANCE = Path(__file__).parents[4] / "docs" / "PERFORMANCE.md"


def test_the_bytes_of_a_step_are_weights_and_keys_and_values() -> None:
    """GPT-2 small: 12 · (768 · 2,304 + 768 · 768 + 2 · 768 · 3,072) + 50,304 · 768 weights, of two bytes each."""
    assert weight_bytes(SMALL) == 2 * (12 * 7_077_888 + 50_304 * 768)
    assert weight_bytes(MEDIUM) == pytest.approx(707e6, rel=0.002)
    # 12 layers · 2 · 768 values of two bytes are 36,864 bytes per token.
    assert kv_bytes(SMALL, 96, 150) == 96 * 150 * 36_864


def test_an_estimate_lies_between_full_overlap_and_none() -> None:
    found = step_estimate(SMALL, 3, 84, H100_GB_S, SEVEN, launch_us=2.0)
    assert found.num_kernels == 7 * 12 + 5
    assert found.read_us == pytest.approx((247.2e6 + 3 * 84 * 36_864) / 3350e3, rel=0.001)
    assert found.launch_us == 178
    assert (found.least_us, found.most_us) == (178, found.read_us + 178)
    # Where reads take longer than launches, they are the lower bound.
    assert (
        step_estimate(SMALL, 96, 1000, H100_GB_S, FIVE).least_us > step_estimate(SMALL, 96, 1000, H100_GB_S).launch_us
    )


def test_the_published_tables_are_those_that_the_code_computes() -> None:
    assert estimate_markdown() in PERFORMANCE.read_text("utf-8")


def test_every_card_of_the_tables_names_the_source_of_its_bandwidth() -> None:
    for card in CARDS:
        assert "data sheet" in card.source
        assert f"{card.gb_s:,.0f}" in card.source or f"{card.gb_s / 1000:.2f}" in card.source
