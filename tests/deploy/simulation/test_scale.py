"""Cells, machines and limits from costs that are easy to reckon with."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from deploy.simulation.command import simulate
from deploy.simulation.costs import Costs, Inputs, Kind
from deploy.simulation.scale import (
    Assumptions,
    CellRow,
    Goal,
    best_cell,
    limits,
    markdown,
    planned_writers,
    run_cell,
    scale,
)
from deploy.simulation.writers import keys_per_s

COSTS = Costs(gateway_s=0.004, worker_s=0.01, prefill_s=0.0, prompt_s=0.001, step_s=0.001)
SLOW = Costs(gateway_s=0.02, worker_s=0.05, prefill_s=0.0, prompt_s=0.02, step_s=0.001)  # few keys: short tests
INPUTS = Inputs(
    source="a test", models="none", num_cores=2, costs=COSTS, fixed=Kind(), key=Kind(num_steps=9), key_costs=COSTS
)
ASSUMPTIONS = Assumptions(price_per_hour=0.36)
GOAL = Goal(p99_ms=200.0)
SECONDS = 3.0


def test_a_cell_uses_the_cpu_time_of_its_keys() -> None:
    row = run_cell(INPUTS, ASSUMPTIONS, num_machines=1, num_writers=20, seconds=10.0, seed=1)
    assert row.answered == 1.0
    assert row.answers_per_s == pytest.approx(20 * keys_per_s(), rel=0.1)
    assert row.gateway_busy == pytest.approx(row.answers_per_s * 0.004, rel=0.1)
    assert row.workers_busy == pytest.approx(row.answers_per_s * 0.02 / 2, rel=0.15)
    assert row.p50_ms > 20.0


def test_too_many_writers_miss_the_goal() -> None:
    row = run_cell(INPUTS, ASSUMPTIONS, num_machines=1, num_writers=80, seconds=SECONDS, seed=1)
    assert not row.meets(GOAL)
    assert row.superseded > 0.1


def test_cells_grow_with_their_machines() -> None:
    inputs = msgspec.structs.replace(INPUTS, key_costs=SLOW)
    rows = best_cell(inputs, ASSUMPTIONS, Goal(p99_ms=1000.0), 1.0, seed=1, max_machines=2)
    assert len(rows) >= 2
    assert rows[1].num_writers > 1.5 * rows[0].num_writers
    assert all(row.meets(Goal(p99_ms=1000.0)) for row in rows)


def test_a_million_writers_take_cells_by_the_thousand() -> None:
    cell = run_cell(INPUTS, ASSUMPTIONS, num_machines=2, num_writers=30, seconds=SECONDS, seed=1)
    small, large = scale(INPUTS, ASSUMPTIONS, cell, [30, 1_000_000], SECONDS, seed=1)
    assert (small.num_cells, small.worker_machines, small.gateway_machines) == (1, 2, 1)
    assert large.num_cells == math.ceil(1_000_000 / planned_writers(30))
    assert large.worker_machines == 2 * large.num_cells
    assert large.gateway_machines == math.ceil(large.num_cells / 2)
    assert large.cost_per_hour == pytest.approx(0.36 * (large.worker_machines + large.gateway_machines))
    suggestions = 3 * 1_000_000 * keys_per_s() * large.cell.answered * 3600 / 1000
    assert large.cost_per_thousand == pytest.approx(large.cost_per_hour / suggestions)


def test_hashing_leaves_room_for_crowded_cells() -> None:
    mean = planned_writers(100)
    assert mean + 3.1 * math.sqrt(mean) <= 100
    assert mean > 70


def test_what_is_full_first_is_listed_first() -> None:
    cell = CellRow(
        num_writers=100, num_machines=4, answers_per_s=300.0, answered=1.0, superseded=0.0, refused=0.0,
        p50_ms=10.0, p99_ms=20.0, gateway_busy=0.8, workers_busy=0.9,
    )  # fmt: skip
    found = limits(ASSUMPTIONS, cell)
    assert [limit.num_writers for limit in found] == sorted(limit.num_writers for limit in found)
    assert found[0].what == "cores of one worker machine"
    assert found[0].num_writers == 25
    text = markdown([cell], cell, [], found)
    assert "| 4 (chosen) | 100 |" in text


def test_the_command_prints_the_tables_and_refuses_other_files(tmp_path: Path) -> None:
    file = tmp_path / "inputs.json"
    runner = CliRunner()
    assert "tercet simulate fit" in str(runner.invoke(simulate, ["scale", str(file)]).exception)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(INPUTS, key=None)))
    assert "--writers" in str(runner.invoke(simulate, ["scale", str(file)]).exception)
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(INPUTS, key_costs=SLOW)))
    result = runner.invoke(simulate, ["scale", str(file), "--seconds", "1", "--p99-ms", "1000"])
    assert result.exit_code == 0, result.output
    assert "| 1,000,000 |" in result.output
