"""What `tercet bench page` makes of a record, and one quick run in a real Chromium."""

from __future__ import annotations

import shutil

import pytest

from deploy.bench.speed.page import writing_row
from tests.deploy.bench.command import run_bench


def test_a_record_is_counted_by_key() -> None:
    """ "the": at "t" the ghost "he sea" is painted after 20 ms; "h" leaves "e sea", 5 ms later; "e" is answered by
    another text, although " sea" agrees, so one of two that held was replaced."""
    recorded = {
        "keys": [0.0, 200.0, 400.0],
        "ghosts": [
            {"text": "he sea", "changed": 12.0, "painted": 20.0},
            {"text": "e sea", "changed": 201.0, "painted": 205.0},
            {"text": "", "changed": 401.0, "painted": 405.0},
            {"text": "ory", "changed": 420.0, "painted": 430.0},
        ],
        "openings": [299.0, 900.0],
    }
    row = writing_row("eager", "the", recorded)
    assert (row.num_keys, row.shown, row.flicker) == (3, 1.0, 0.5)
    assert row.paint_ms["p50"] == 20.0
    assert (row.num_openings, row.num_short_openings) == (2, 1)


def test_what_is_painted_after_the_next_key_does_not_count() -> None:
    recorded = {
        "keys": [0.0, 100.0],
        "ghosts": [{"text": "x", "changed": 95.0, "painted": 104.0}, {"text": "", "changed": 101.0, "painted": 106.0}],
        "openings": [],
    }
    row = writing_row("eager", "ab", recorded)
    assert (row.shown, row.paint_ms, row.flicker) == (0.0, {}, 0.0)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed (apt-get install chromium)")
def test_bench_page_types_in_a_real_page() -> None:
    document, tables = run_bench("page")
    rows = {row.get("eagerness") or row["editor"]: row for row in document["rows"]}
    assert rows.keys() == {"eager", "normal", "page", "bare textarea"}
    for eagerness in ("eager", "normal"):
        assert rows[eagerness]["num_keys"] == document["workload"]["keys"]
    assert rows["eager"]["shown"] > 0
    assert rows["eager"]["paint_ms"]["p50"] > 0
    assert rows["page"]["key_ms"]["p95"] > 0
    assert "bare textarea" in tables
