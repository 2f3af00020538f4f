"""`tercet bench remote` with real pools on a Unix socket, TCP and TLS."""

from __future__ import annotations

from tests.deploy.bench.command import run_bench


def test_bench_remote_reports_each_way_to_the_workers() -> None:
    document, shown = run_bench("remote")
    assert [row["way"] for row in document["rows"]] == ["Unix socket", "TCP", "TLS"]
    for row in document["rows"]:
        assert row["gateway_ms"] > 0
        assert row["workers_ms"] > 0
        assert row["w_ms"] > 0
        assert row["answers_per_s"] > 0
    assert document["not_measured"] == {}
    assert "The way to the workers" in shown
