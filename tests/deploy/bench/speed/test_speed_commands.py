"""`tercet bench engine`, `http` and `writer` end to end. No time is asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.bench.command import run_bench
from tests.e2e.harness import ROOT, running


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("engine", "--only", "speed"), "speed is not a row"), (("writer", "--only", "speed"), "speed is not a part")],
)
def test_unknown_rows_and_parts_are_refused(arguments: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "bench", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert message in done.stderr
    assert not done.stdout


def test_bench_engine_reports_rows_ceiling_and_machine(tmp_path: Path) -> None:
    png = tmp_path / "bench.png"
    document, shown = run_bench(
        "engine", "--models", "embedded", "--device", "cpu", "--plot", str(png),
        "--only", "engine,overhead", "--only", "gpu-small",
    )  # fmt: skip
    rows = {row["target"]["name"]: row for row in document["rows"]}
    assert list(rows) == ["engine", "overhead", "gpu-small"]
    assert rows["engine"]["figure"] == pytest.approx(rows["engine"]["ours"] / rows["engine"]["against"], rel=1e-3)
    assert rows["engine"]["is_met"] is None  # the targets are for GPT-2 small's shape
    assert rows["gpu-small"]["figure"] is None
    assert "not measured" in shown
    assert rows["gpu-small"]["why_not"] in shown
    assert document["is_quick"]
    assert document["series"]["gateway-cached"]["max"] == 0
    assert document["ceiling"]["read_gb_s"] > 0
    assert set(document["ceiling"]["kernels_ms"]) == {"1", "3", "64"}
    assert {"cpu", "cores", "flags", "gpus", "others_share_of_cores"} <= document["machine"].keys()
    assert {"python", "torch", "transformers", "tercet"} <= document["versions"].keys()
    assert "bench engine" in document["command"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_bench_http_reports_each_level_of_a_running_server(tmp_path: Path) -> None:
    with running(tmp_path) as tercet:
        document, shown = run_bench(
            "http", "--url", tercet.url, "--clients", "1,2", "--plot", str(tmp_path / "http.png")
        )  # fmt: skip
    assert document["model"] == "embedded"
    *levels, patsnap = document["rows"]
    assert [level["num_clients"] for level in levels] == [1, 2]
    assert (patsnap["workload"], patsnap["num_errors"]) == ("Patsnap", 0)
    assert patsnap["tokens_per_s"] > 0
    for level in levels:
        assert level["num_requests"] >= level["num_clients"]
        assert level["num_errors"] == 0
        assert level["min_ms"] <= level["p50_ms"] <= level["p90_ms"] <= level["p99_ms"] <= level["max_ms"]
        assert level["ceiling_qps"] > 0
        assert level["speedup"] > 0
    assert "TTFT: time to first token" in shown
    assert (tmp_path / "http.png").stat().st_size > 0


def test_bench_cost_reports_cpu_time_of_both_pools() -> None:
    document, shown = run_bench("cost")
    loads = [(row["version"], row["num_slots"], row["num_clients"]) for row in document["rows"]]
    assert sorted(loads) == [("this", 1, 4), ("this", 1, 16), ("this", 2, 4), ("this", 2, 16)]
    for row in document["rows"]:
        assert row["gateway_ms"] > 0
        assert row["workers_ms"] > 0
        assert row["answers_per_s"] > 0
    assert "CPU time per answer" in shown


def test_bench_writer_runs_all_parts() -> None:
    document, _ = run_bench("writer")
    assert {row["part"] for row in document["rows"]} == {"stream", "typing", "deadlines", "distinct"}
    [resources] = [row["figures"] for row in document["rows"] if "sequences" in row["figures"]]
    assert resources["sequences"] == 0


def test_bench_writer_types_as_its_options_say() -> None:
    document, shown = run_bench(
        "writer", "--only", "typing", "--writers", "2", "--keys-per-second", "20", "--context-chars", "900",
        "--field", "strategy=predict",
    )  # fmt: skip
    idle, one_writer, all_writers, _ = document["rows"]
    assert [row["what"] for row in (idle, one_writer, all_writers)] == ["idle server", "one writer", "2 writers"]
    for row, num_requests in ((one_writer, 10), (all_writers, 20)):
        figures = row["figures"]
        ratio = figures["p99 ms"] / idle["figures"]["p99 ms"]
        assert figures["p99 ÷ idle p99"] == pytest.approx(ratio)
        num_unanswered = figures["superseded"] * num_requests + figures["other"]
        assert figures["n"] + num_unanswered == pytest.approx(num_requests)
    assert document["workload"] == {
        "fields": {"strategy": "predict"}, "num_writers": 2, "keys_per_s": 20.0, "context_chars": 900
    }  # fmt: skip
    assert "superseded" in shown


def test_bench_predict_compares_strategies() -> None:
    document, shown = run_bench("predict", "--device", "cpu")
    rows = {(row["part"], row["what"]): row["figures"] for row in document["rows"]}
    assert [part for part, _ in rows] == ["request"] * 5 + ["W through the gateway, cold"] * 2 + [
        "W: predict − sample"
    ]  # fmt: skip
    medians = [figures["p50 ms"] for (part, _), figures in rows.items() if part.startswith("W through")]
    assert rows["W: predict − sample", "difference of medians"]["ms"] == pytest.approx(medians[1] - medians[0])
    assert {figures["n"] for (part, _), figures in rows.items() if part == "request"} == {8.0}
    assert "ranking paths" in shown
