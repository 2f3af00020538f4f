"""The CPU rows of `tercet bench engine`: figures, verdicts, bounds."""

from __future__ import annotations

from deploy.bench.speed.rows import cpu_rows
from deploy.bench.speed.targets import TARGETS, is_met
from deploy.load.rounds import Results
from deploy.load.workload import W

SAMPLES = {
    "a": [3000.0, 3200.0, 9000.0], "b-bf16": [600.0], "gateway": [100.0, 90.0, 110.0], "gateway-overhead": [5.0],
    "engine": [150.0], "linears-request": [100.0], "clients": [600.0], "linears-crowd": [1000.0],
    "clients-cost": [0.02], "start": [4.0, 2.0, 2.5], "embedded": [61.0],
}  # fmt: skip


def test_rows_compare_medians_with_the_baseline_or_the_ceiling() -> None:
    wanted = ["request", "batched", "engine", "clients", "overhead", "start", "embedded"]
    rows = {row.target.name: row for row in cpu_rows(wanted, Results(SAMPLES), W, is_comparable=True)}
    assert {name: row.figure for name, row in rows.items()} == {
        "request": 32, "batched": 6, "engine": 1.5, "clients": 0.625, "overhead": 5, "start": 2.5, "embedded": 61,
    }  # fmt: skip
    assert {name: (row.is_met, row.is_goal_met) for name, row in rows.items()} == {
        "request": (True, True), "batched": (False, False), "engine": (True, False), "clients": (True, False),
        "overhead": (True, False), "start": (True, True), "embedded": (False, None),
    }  # fmt: skip


def test_a_model_of_another_shape_gets_no_verdict() -> None:
    [row] = cpu_rows(["request"], Results(SAMPLES), W, is_comparable=False)
    assert (row.figure, row.is_met, row.is_goal_met) == (32, None, None)


def test_a_row_whose_contender_failed_has_the_reason() -> None:
    [row] = cpu_rows(["embedded"], Results({"a": [1.0]}, {"embedded": "status 504"}), W, is_comparable=True)
    assert row.figure is None
    assert "status 504" in str(row.why_not)


def test_a_result_equal_to_the_bound_meets_it() -> None:
    assert is_met(20, 20, "at least")
    assert not is_met(19.9, 20, "at least")
    assert is_met(1.8, 1.8, "at most")
    assert not is_met(1.81, 1.8, "at most")


def test_there_are_nine_cpu_rows_and_five_gpu_rows() -> None:
    assert [target.device for target in TARGETS.values()].count("cpu") == 9
    assert [target.device for target in TARGETS.values()].count("gpu") == 5
