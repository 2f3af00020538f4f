"""What `python -m tests.sizes` counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import sizes

MARKED = "One two.\n<!-- written by tests.writer: a table -->\n| three |\n<!-- end -->\nFour.\n"


def test_a_written_part_counts_by_the_strings_of_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/writer.py").write_text('"""Not counted here."""\nHEAD = f"five {6} seven"\n')
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    assert sizes.num_words([MARKED]) == 3 + 2
    assert sizes.num_words([MARKED, MARKED.replace("<!-- end -->", "")]) == 3 + 2 + 2, (
        "without an end, to the page's end"
    )
    assert sizes.num_words([MARKED.replace("written", "shown")]) == len(MARKED.split())


def test_cases_in_data_files_count_and_what_others_wrote_does_not() -> None:
    names = sizes.known_files()
    cases = "tests/deploy/supervision/grafana/alerts_test.yaml"
    assert cases in names
    without = sizes.sizes([name for name in names if name != cases])
    assert sizes.sizes(names)["test_lines"] - without["test_lines"] > 100
    assert "gateway/static/vendor/codemirror.js" not in names


def test_a_size_above_its_limit_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = sizes.sizes(sizes.known_files())
    monkeypatch.setattr(sizes, "sizes", lambda names: now | {"product_lines": 10**6})
    assert sizes.main() == 1
    assert "product lines" in capsys.readouterr().out
