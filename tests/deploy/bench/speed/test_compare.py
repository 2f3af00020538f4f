"""`tercet bench compare`: ratios, and which direction is better."""

from __future__ import annotations

from rich.console import Console

from deploy.bench.speed.compare import Comparison, comparison_table


def test_a_ratio_is_this_checkout_over_the_other_and_says_which_is_better() -> None:
    rows = [
        Comparison("latency", "ms", ours=9.0, other=10.0, more_is_better=False, num_samples=5),
        Comparison("throughput", "tokens/s", ours=90.0, other=100.0, more_is_better=True, num_samples=5),
    ]
    assert [row.ratio for row in rows] == [0.9, 0.9]
    console = Console(record=True, width=200)
    console.print(comparison_table(rows, 5))
    lines = [line for line in console.export_text().splitlines() if "0.900" in line]
    assert [("better" in line, "worse" in line) for line in lines] == [(True, False), (False, True)]
