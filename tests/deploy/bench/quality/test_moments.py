"""`tercet bench moments`: its table, and a small run."""

from __future__ import annotations

from deploy.bench.quality.moments import Moment, moments_markdown
from deploy.bench.quality.replay import PROSE
from tests.deploy.bench.command import run_bench


def moment(context: str, following: str, *suggestions: tuple[str, float]) -> Moment:
    return Moment(file="f", context=context, following=following, suggestions=list(suggestions), is_shown=False)


def test_a_cell_shows_spaces_line_breaks_and_marks_as_they_are() -> None:
    table = moments_markdown([moment("a | b ", "_so_\non ", (" the sea", 1.25), ("n", 0.0))])
    assert table.splitlines()[2] == (
        r"| …a \| b␣ | ␣the sea (1.2)<br>n (0.0) | held back | \_so\_⏎on␣… |"
    )  # fmt: skip


def test_a_right_word_is_a_whole_one() -> None:
    assert moment("at the s", "ea and", ("and", 1.0), ("ea was", 1.0)).has_right_word
    assert not moment("at the s", "easide", ("ea", 1.0)).has_right_word


def test_bench_moments_reports_contexts_suggestions_and_what_follows() -> None:
    document, shown = run_bench(
        "moments", str(PROSE), "--number", "12", "--seed", "3", "--min-usefulness", "1", is_quick=False
    )
    text = PROSE.read_text(encoding="utf-8")
    assert len(document["rows"]) == 12
    for row in document["rows"]:
        assert row["context"] + row["following"] in text
        usefulness = [keys for _, keys in row["suggestions"]]
        assert usefulness == sorted(usefulness, reverse=True)
        assert row["is_shown"] == (max(usefulness, default=0) >= 1)
    assert {row["is_shown"] for row in document["rows"]} == {True, False}
    assert sum(line.startswith("| …") for line in shown.splitlines()) == 12
    assert "Held back at" in document["notes"][1]
