"""`tercet bench typist` and `samples` end to end."""

from __future__ import annotations

import pytest

from tests.deploy.bench.command import run_bench


@pytest.mark.parametrize("options", [[], ["--engine"]])
def test_bench_typist_reports_savings_by_suggestions_and_latency_budget(options: list[str]) -> None:
    document, shown = run_bench("typist", "workers/checkpoints/page.txt", "--field", "length=8", *options)
    shares = [row["share"] for row in document["rows"]]
    assert len(shares) == (3 if options else 12)
    assert all(-1 <= share <= 1 for share in shares)
    assert "Keystroke savings" in shown
    assert any("8 to 15 %" in note for note in document["notes"])


def test_bench_samples_reports_fifty_different_suggestions() -> None:
    document, shown = run_bench("samples", "--field", "length=8", is_quick=False)
    assert len(document["rows"]) == 10
    suggestions = [text for row in document["rows"] for text in row["suggestions"]]
    assert len(set(suggestions)) == len(suggestions) == 50
    assert "It was raining when we" in shown
