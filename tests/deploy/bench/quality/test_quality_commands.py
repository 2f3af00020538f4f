"""`tercet bench typist`, `cache`, `samples` and `duplicates` end to end."""

from __future__ import annotations

import lzma
import subprocess
import sys
from pathlib import Path

from deploy.bench.quality.document_cache import HISTORIES, MIXTURES, WINDOWS
from deploy.bench.quality.replay import PROSE
from deploy.load.corpus import HELD_OUT
from tests.deploy.bench.command import run_bench


def test_bench_typist_reports_savings_by_rule_and_number_of_suggestions(tmp_path: Path) -> None:
    """The prose is a corpus's held-out books, typed through the gateway; the trigrams are those of its other book."""
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
    wanted += [("literature", "one key per word", 1)]
    wanted += [("literature", name, number) for name in ("trigrams", "trigrams + document") for number in (1, 3)]
    assert set(rows) == {(file, *key) for file in files for key in wanted}
    # The trigrams have read these books, so they know every word that follows.
    assert rows["all", "literature", "trigrams", 3]["share"] > 0.5
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
    assert found == [("literature", "tercet", 1), ("pause", "tercet", 1), ("literature", "one key per word", 1)]
    assert "trigrams" in document["not_measured"]


def test_bench_cache_reports_each_window_and_each_cache() -> None:
    document, shown = run_bench("cache", str(PROSE))
    rows = {(row["window_tokens"], row["history"], row["mixture"]): row for row in document["rows"]}
    caches = {(256, history, mixture) for history in HISTORIES for mixture in MIXTURES}
    assert set(rows) == {(window, "", "") for window in WINDOWS} | caches
    assert rows[256, "", ""]["change"] == 0
    # Contexts of 2 tokens need not recur in a few words; the empty context always occurs.
    assert all(rows[256, history, next(iter(MIXTURES))]["change"] != 0 for history in HISTORIES)
    assert all(0.5 < row["bits_per_character"] < 4 for row in rows.values())
    assert "µs per key" in shown


def test_bench_cache_needs_prose() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "bench", "cache"],
        cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "name the prose" in done.stderr


def test_bench_samples_reports_fifty_different_suggestions() -> None:
    document, shown = run_bench("samples", "--field", "length=8", is_quick=False)
    assert len(document["rows"]) == 10
    suggestions = [text for row in document["rows"] for text in row["suggestions"]]
    assert len(set(suggestions)) == len(suggestions) == 50
    assert "It was raining when we" in shown


def test_bench_duplicates_compares_consecutive_with_independent_seeds() -> None:
    """At a low temperature, independent branches are often equal."""
    document, shown = run_bench("duplicates", "--field", "temperature=0.3", "--field", "length=2")
    consecutive, independent = document["rows"]
    assert (consecutive["seeds"], independent["seeds"]) == ("consecutive", "independent")
    assert consecutive["num_requests"] == independent["num_requests"] == 20
    assert set(consecutive["shares"]) == {"text", "first word", "first three words"}
    assert 0 < independent["shares"]["text"] <= independent["shares"]["first word"]
    assert consecutive["shares"]["text"] <= independent["shares"]["text"]
    assert "Requests with two of 3 branches alike" in shown
