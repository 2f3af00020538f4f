"""The parts of pages that commands write are up to date, and each result file is on a page."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.errors import StartError
from tests.bench import results
from tests.bench.results import RESULTS
from tests.bench.run import BenchDocument
from tests.documentation.written import PAGES, PART, write_parts
from tests.sizes import ROOT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_written_parts_are_up_to_date(page: Path) -> None:
    """After a change of a result file or of a generator: `make docs`."""
    text = page.read_text(encoding="utf-8")
    assert text == write_parts(text)
    assert text.count("<!-- end -->") == len(PART.findall(text)), "a marker without its counterpart"


def test_each_result_file_is_shown() -> None:
    names = {name for page in PAGES for _, _, name, _ in PART.findall(page.read_text(encoding="utf-8"))}
    assert {path.stem for path in RESULTS.glob("*.json")} <= {name.partition(";")[0] for name in names}


def test_a_recorded_run_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    more = {"device": "cpu", "settings": {}, "workload": {}, "is_quick": False}
    document = msgspec.convert(
        {"bench": "http", "command": "c", "started_at": "2026-11-29T01:02:03", "model": "m", **more}, BenchDocument
    )
    document.rows = [{"clients": 4000, "p50 ms": 12.345, "note": None}]
    results.record("http", document, document.rows)
    lines = results.table("http; p50 ms; clients").splitlines()
    assert lines[:3] == ["| p50 ms | clients |", "|---|---|", "| 12.3 | 4,000 |"]
    assert lines[-1].startswith("*`c`; m; commit ")
    assert "2026-11-29" in lines[-1]
    document.is_quick = True
    with pytest.raises(StartError, match="quick"):
        results.record("http", document, document.rows)
