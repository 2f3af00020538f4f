"""Measure, fit, check and multiply on this machine, with a real server of two slots. Short: its figures mean little."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from deploy.simulation.check import check
from deploy.simulation.fit import fit, fit_key
from deploy.simulation.measurement import NUM_SLOTS, Measurement, fixed_length_plans, writer_plans
from deploy.simulation.observations import read_observations, write_json
from deploy.simulation.scale import Assumptions, run_cell

pytestmark = pytest.mark.deploy
SHARE = 0.4  # of the seconds of each turn
MAX_OTHERS_SHARE = 1.0  # no turn is repeated


@pytest.mark.timeout(240)
def test_a_measured_machine_is_fitted_checked_and_multiplied(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    measurement = Measurement("embedded", Console(stderr=True), MAX_OTHERS_SHARE)
    write_json(file, measurement.run(1, fixed_length_plans, SHARE))
    observations = read_observations(file)
    assert observations.num_slots == NUM_SLOTS
    assert all(turn.wall_ms and turn.gateway_cpu_s for load in observations.loads for turn in load.turns)
    inputs = fit(observations)
    rows = check(inputs, observations)
    assert len(rows) == 3
    assert all(turn.spans for load in observations.loads for turn in load.turns if load.plan.rate_qps)
    for row in rows:  # no 15 %: other processes may use the cores in so short a run
        assert 0.2 < row.simulated_ms[0] / row.measured_ms[0] < 5.0, row

    typed = Measurement("embedded", Console(stderr=True), MAX_OTHERS_SHARE).run(
        1, lambda _: writer_plans([4, 8]), SHARE
    )
    assert not any(turn.num_failed for load in typed.loads for turn in load.turns)
    inputs = fit_key(inputs, typed)
    cell = run_cell(inputs, Assumptions(), num_machines=2, num_writers=4, seconds=4.0, seed=1)
    assert cell.answered > 0.9
    assert 0.0 < cell.gateway_busy < 1.0
