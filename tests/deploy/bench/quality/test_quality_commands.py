"""`tercet bench typist` and `samples` end to end."""

from __future__ import annotations

import lzma
from pathlib import Path

from deploy.bench.quality.replay import PROSE
from deploy.load.corpus import HELD_OUT
from tests.deploy.bench.command import run_bench


def test_bench_typist_reports_savings_by_rule_and_number_of_suggestions(tmp_path: Path) -> None:
    """The prose is a corpus's held-out books, typed through the gateway"""
    corpus, plot = tmp_path / "corpus.xz", tmp_path / "plot.png"
    prose = PROSE.read_text(encoding="utf-8")
    books = [f"<|book|> Author - {title}\n\n{prose}\n\n" for title in (*HELD_OUT, "Another")]
    corpus.write_bytes(lzma.compress("".join(books).encode()))
    document, shown = run_bench(
        "typist", "--corpus", str(corpus), "--field", "length=8", "--writers", "2", "--plot", str(plot)
    )
    rows = {(row["file"], row["rule"], row["suggester"], row["num_suggestions"]): row for row in document["rows"]}
    files = ["anne-of-avonlea.txt", "pragmatism.txt", "three-men-in-a-boat.txt", "all"]
    wanted = [(rule, "tercet", number) for rule in ("literature", "page", "pause") for number in (1, 2, 3)]
    assert set(rows) == {(file, *key) for file in files for key in wanted}
    assert all(row["low"] <= row["share"] <= row["high"] for row in rows.values())
    assert "Keystroke savings" in shown
    assert any("8 to 15 %" in note for note in document["notes"])
    assert plot.stat().st_size > 10_000


def test_bench_typist_uses_an_engine_in_the_process() -> None:
    document, _ = run_bench(
        "typist", str(PROSE.relative_to(Path.cwd())), "--field", "length=8", "--engine", "--rule", "pause,literature",
        "--samples", "1",
    )  # fmt: skip
    found = [(row["rule"], row["suggester"], row["num_suggestions"]) for row in document["rows"]]
    assert found == [("literature", "tercet", 1), ("pause", "tercet", 1)]


def test_bench_samples_reports_fifty_different_suggestions() -> None:
    document, shown = run_bench("samples", "--field", "length=8", is_quick=False)
    assert len(document["rows"]) == 10
    suggestions = [text for row in document["rows"] for text in row["suggestions"]]
    assert len(set(suggestions)) == len(suggestions) == 50
    assert "It was raining when we" in shown
