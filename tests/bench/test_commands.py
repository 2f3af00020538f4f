"""Each command of `make bench` end to end, with few repetitions. No time is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.tuning.load.server import ROOT
from tests.programs import run_program


def run(*arguments: str, code: int = 0) -> tuple[Any, str]:
    """The JSON document, which must be the only line on standard output, and the text on standard error."""
    done = run_program([sys.executable, "-m", "tests.bench", *arguments], cwd=ROOT, timeout=280)
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 1
    return json.loads(lines[0]) if lines else None, done.stderr


def rows_of(*arguments: str) -> list[dict[str, Any]]:
    """The rows, which are shown, too."""
    document, shown = run(*arguments)
    rows: list[dict[str, Any]] = document["rows"]
    assert f"tests.bench {arguments[0]}" in document["command"]
    assert next(iter(rows[0])) in shown
    return rows


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("engine", "--only", "speed"), 2, "speed is not a row"),
        (("writer", "--only", "speed"), 2, "speed is not a part"),
        (("typist", "--kind", "novels"), 1, "novels need FILES or --corpus"),
        (("typist", "--keytype", "tests"), 1, "core.jsonl and edge.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], code: int, message: str) -> None:
    document, shown = run(*arguments, code=code)
    assert document is None
    assert message in shown


def test_engine() -> None:
    names = ["engine", "clients", "overhead", "start", "embedded", "predict"]
    document, _ = run("engine", "--quick", "--models", "embedded", "--only", ",".join(names))
    rows = document["rows"]
    assert len(rows) == len(names)
    assert ["met" in row["required"] for row in rows] == [False] * 3 + [True] * 3, "a model of another shape"
    assert document["is_quick"]
    assert document["series"]["engine"]["samples"]
    assert {"1", "3", "48", "64"} <= set(document["ceiling"]["kernels_ms"])
    assert {"cpu", "cores", "flags", "gpus", "others_share_of_cores"} <= document["machine"].keys()


def test_engine_against_another_checkout() -> None:
    rows = rows_of("engine", "--quick", "--against", str(ROOT))
    assert len(rows) == 5
    assert all(0 < float(row["this ÷ other"]) < 100 for row in rows)


def test_http() -> None:
    levels = rows_of("http", "--quick", "--models", "embedded", "--clients", "1,2")
    assert [level["clients"] for level in levels] == [1, 2]
    for level in levels:
        assert level["n"] >= level["clients"]
        assert level["min ms"] <= level["p50 ms"] <= level["p90 ms"] <= level["p99 ms"] <= level["max ms"]
        assert level["QPS ÷ QPS of linear layers"] > 0
        assert level["speedup over (a)"] > 0


def test_cost() -> None:
    rows = rows_of("cost", "--quick")
    assert [(row["slots"], row["clients"]) for row in rows] == [(1, 4), (2, 4), (1, 16), (2, 16)]
    assert all(min(row["gateway, ms"], row["workers, ms"], row["answers/s"]) > 0 for row in rows)


def test_memory() -> None:
    rows = rows_of("cost", "--memory", "3")
    assert {"supervisor", "gateway", "worker: embedded", "all"} <= {row["process"] for row in rows}
    assert all(0 < row["of it anonymous"] <= row["at rest, MB"] for row in rows)


def test_writer() -> None:
    rows = rows_of("writer", "--quick", "--writers", "2", "--keys-per-second", "20")
    assert [sum(name in row for row in rows) for name in ("stream", "typing", "writers")] == [4, 3, 7]


def test_typist() -> None:
    chosen = ("workers/checkpoints/page.txt", "--kind", "novels,letters", "--models", "embedded,synthetic:small")
    document, _ = run("typist", "--quick", "--writers", "2", "--field", "length=8", *chosen)
    found = [(row["model"], row["text"], row["rule"]) for row in document["rows"]]
    assert len(set(found)) == len(found) == 2 * 2 * 2
    assert {f"{number} shown: saved, %" for number in (1, 2, 3)} < document["rows"][0].keys()
    assert document["notes"][-1].startswith("For comparison")
    assert {model for model, _, _ in found} == {"embedded, int8", "synthetic:small, int8"}
    assert (document["workload"]["passages"], document["workload"]["words"]) == (4, 20)


def test_typist_shows_fifty_different_suggestions() -> None:
    rows = rows_of("typist", "--openings", "--field", "length=8")
    assert len({row["suggestion"] for row in rows}) == len(rows) == 50


def test_stated() -> None:
    assert {row["place"] for row in rows_of("typist", "--stated", "6")} == {"append", "inside a word", "gap"}


def test_keytype(tmp_path: Path) -> None:
    case = {"context": {"beforeCursor": "At the ", "afterCursor": ""}, "expected": {"kind": "suppress"}}
    for suite in ("core", "edge"):
        (tmp_path / f"{suite}.jsonl").write_text(json.dumps({**case, "suites": [suite]}), encoding="utf-8")
    assert [row["cases"] for row in rows_of("typist", "--keytype", str(tmp_path))] == [1, 1, 2]


def test_misspellings() -> None:
    [row] = rows_of("typist", "--misspellings")
    assert row["silent"] + row["corrected"] >= 34
    assert row["predicted"] == 40


def test_gap() -> None:
    rows = rows_of("gap", "--quick", "--field", "strategy=predict")
    assert [row["words"] for row in rows] == [1, 2, 3, 4, 5, 6, "all"]
    assert all(0 <= row["exact, %"] <= row["first word, %"] <= 100 for row in rows)
    assert rows[-1]["gaps"] == 12


def test_page() -> None:
    *writing, textarea, page = rows_of("page", "--quick")
    assert [row["suggestions"] for row in writing] == ["eager", "normal"]
    assert writing[0]["key to paint, p50 ms"] > 0
    assert [row["editor"] for row in (textarea, page)] == ["bare textarea", "page"]
    assert page["CPU per key, p99 ms"] > 0
