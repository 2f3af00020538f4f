"""Each command of `make bench` end to end, with few repetitions. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.load.server import ROOT
from tests.bench.speed.rows import TARGETS


def run(*arguments: str, code: int = 0) -> tuple[Any, str]:
    """The JSON document, which must be the only line on standard output, and the text on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 1
    return json.loads(lines[0]) if lines else None, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("engine", "--only", "speed"), "speed is not a row"), (("writer", "--only", "speed"), "speed is not a part")],
)
def test_unknown_rows_and_parts_are_refused(arguments: tuple[str, ...], message: str) -> None:
    document, shown = run(*arguments, code=2)
    assert document is None
    assert message in shown


def test_engine() -> None:
    names = ["engine", "clients", "overhead", "start", "embedded", "predict"]
    document, shown = run("engine", "--quick", "--models", "embedded", "--only", ",".join(names))
    rows = {row["target"]["name"]: row for row in document["rows"]}
    assert list(rows) == [name for name in TARGETS if name in names]
    for name in ("engine", "predict"):
        assert rows[name]["figure"] == pytest.approx(rows[name]["ours"] / rows[name]["against"], rel=1e-3)
    assert rows["engine"]["is_met"] is None  # the targets are for GPT-2 small's shape
    assert document["is_quick"]
    assert document["series"]["gateway-cached"]["max"] == 0
    assert {"1", "3", "48", "64"} <= set(document["ceiling"]["kernels_ms"])
    assert {"cpu", "cores", "flags", "gpus", "others_share_of_cores"} <= document["machine"].keys()
    assert "tests.bench engine" in document["command"]
    assert "Targets" in shown


def test_engine_against_another_checkout() -> None:
    rows, shown = run("engine", "--quick", "--against", str(ROOT))
    assert {row["unit"] for row in rows} == {"ms", "tokens/s", "s"}
    assert all(0 < row["ratio"] < 100 for row in rows)
    assert "this ÷ other" in shown


def test_http(tmp_path: Path) -> None:
    plot = tmp_path / "http.png"
    document, shown = run(
        *["http", "--quick", "--models", "embedded", "--clients", "1,2", "--device", "cpu", "--plot"], str(plot)
    )
    *levels, patsnap = document["rows"]
    assert [level["num_clients"] for level in levels] == [1, 2]
    assert (patsnap["workload"], patsnap["num_errors"]) == ("Patsnap", 0)
    for level in levels:
        assert level["num_requests"] >= level["num_clients"]
        assert level["min_ms"] <= level["p50_ms"] <= level["p90_ms"] <= level["p99_ms"] <= level["max_ms"]
        assert level["ceiling_qps"] > 0
        assert level["speedup"] > 0
    assert "TTFT: time to first token" in shown
    assert plot.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "loads"),
    [((), [("this", 1), ("this", 2)]), (("--remote",), [("Unix socket", 1), ("TCP", 1), ("TLS", 1)])],
)
def test_cost(options: tuple[str, ...], loads: list[tuple[str, int]]) -> None:
    document, shown = run("cost", "--quick", *options)
    wanted = [(*load, num_clients) for num_clients in (4, 16) for load in loads]
    assert [(row["version"], row["num_slots"], row["num_clients"]) for row in document["rows"]] == wanted
    for row in document["rows"]:
        assert min(row["gateway_ms"], row["workers_ms"], row["answers_per_s"]) > 0
    assert "CPU time per answer" in shown


def test_memory() -> None:
    rows, shown = run("cost", "--memory", "3")
    assert {"supervisor", "gateway", "worker: embedded"} <= {row["process"] for row in rows}
    assert all(0 < row["at_rest_anonymous_mb"] <= row["at_rest_mb"] for row in rows)
    assert "after 3 requests" in shown


def test_writer() -> None:
    document, _ = run("writer", "--quick", "--writers", "2", "--keys-per-second", "20")
    assert {row["part"] for row in document["rows"]} == {"stream", "typing", "crowd", "distinct"}


def test_typist() -> None:
    document, shown = run("typist", "--quick", "--field", "length=8", "--writers", "2")
    rows = {(row["rule"], row["num_suggestions"]): row for row in document["rows"]}
    assert set(rows) == {(rule, number) for rule in ("literature", "page", "pause") for number in (1, 2, 3)}
    assert all(row["low"] <= row["share"] <= row["high"] for row in rows.values())
    assert "Keystroke savings" in shown


def test_typist_by_kind_of_text_and_model() -> None:
    document, shown = run("typist", "--quick", "--kind", "letters,essays", "--models", "embedded,synthetic:small")
    keys = {(row["file"], row["model"], row["dtype"]) for row in document["rows"]}
    assert keys == {
        (kind, model, "int8") for kind in ("letters", "essays") for model in ("embedded", "synthetic:small")
    }
    assert len(document["rows"]) == 3 * 3 * len(keys)
    assert (document["workload"]["passages"], document["workload"]["words"]) == (4, 20)
    assert "÷ embedded" in shown


def test_typist_needs_books_for_novels() -> None:
    assert "novels need FILES or --corpus" in run("typist", "--kind", "novels", code=2)[1]


def test_typist_shows_fifty_different_suggestions() -> None:
    document, shown = run("typist", "--openings", "--field", "length=8")
    suggestions = [text for row in document["rows"] for text in row["suggestions"]]
    assert len(set(suggestions)) == len(suggestions) == 50
    assert "It was raining when we" in shown


def test_gap() -> None:
    document, shown = run("gap", "--quick", "--field", "strategy=predict")
    rows = document["rows"]
    assert [(row["num_words"], row["has_suffix"]) for row in rows] == [
        (num_words, has_suffix) for num_words in (1, 2, 3, 4, 5, 6, 0) for has_suffix in (False, True)
    ]
    assert all(0 <= row["exact"] <= row["first_word"] <= 1 for row in rows)
    assert rows[-1]["num_gaps"] == 12
    assert "first word, with suffix" in shown


def test_stated() -> None:
    document, shown = run("stated", "--places", "6")
    assert {row["place"] for row in document["rows"]} == {"append", "inside a word", "gap"}
    assert "comes true" in shown


def test_keytype(tmp_path: Path) -> None:
    assert "core.jsonl and edge.jsonl" in run("keytype", str(tmp_path), code=2)[1]
    case = {"context": {"beforeCursor": "At the ", "afterCursor": ""}, "expected": {"kind": "suppress"}}
    for suite in ("core", "edge"):
        (tmp_path / f"{suite}.jsonl").write_text(json.dumps({**case, "suites": [suite]}), encoding="utf-8")
    assert [row["cases"] for row in run("keytype", str(tmp_path))[0]["rows"]] == [1, 1, 2]


def test_misspellings() -> None:
    [row] = run("misspellings")[0]["rows"]
    assert row["silent"] + row["corrected"] >= 34
    assert row["predicted"] == 40


def test_page() -> None:
    document, shown = run("page", "--quick")
    rows = {row.get("eagerness") or row["editor"]: row for row in document["rows"]}
    assert rows.keys() == {"eager", "normal", "page", "bare textarea"}
    assert rows["eager"]["paint_ms"]["p50"] > 0
    assert rows["page"]["key_ms"]["p95"] > 0
    assert "bare textarea" in shown


def test_replay_names_the_answers_that_differ(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    arguments = ("replay", str(record), "--models", "embedded")
    assert run(*arguments)[0] is None
    assert run(*arguments)[0] == {"requests": 200, "different": 0}
    first, *others = record.read_text(encoding="utf-8").splitlines()
    changed = json.loads(first)
    changed["answer"]["seed"] = -1
    record.write_text("\n".join([json.dumps(changed), *others]), encoding="utf-8")
    document, shown = run(*arguments, code=1)
    assert document == {"requests": 200, "different": 1}
    assert "request 0, plain (embedded)" in shown
