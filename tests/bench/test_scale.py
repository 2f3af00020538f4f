"""docs/SCALE.md has the tables that `python -m tests.bench.scale` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import scale

PAGE = Path(__file__).parents[2] / "docs/SCALE.md"


def test_the_page_has_the_printed_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["scale"])
    scale.main()
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 3
    page = PAGE.read_text(encoding="utf-8")
    for table in tables:
        assert table in page
