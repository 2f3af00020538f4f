"""The fit finds costs that were simulated, and the check compares what it should."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pytest

from deploy.load.clients import arrival_offsets_s
from deploy.load.machine import Machine as Computer
from deploy.simulation.check import check
from deploy.simulation.costs import Costs, Inputs, Kind
from deploy.simulation.fit import fit, fit_key, mean_s, simulated_s
from deploy.simulation.observations import LoadPlan, Observations, Observed, Role, Span, Turn
from deploy.simulation.runs import Machine
from deploy.simulation.writers import keys_per_s, press_keys

COMPUTER = Computer(cpu="none", cores=2, flags=[], memory_bytes=0, gpus=[], system="none")
TRUE_COSTS = Costs(
    gateway_s=0.004,
    worker_s=0.004,
    client_s=0.001,
    prefill_s=0.0,
    prompt_s=0.004,
    step_s=4e-4,
    row_s=1e-4,
    contention=0.2,
)
INPUTS = Inputs(source="simulated", models="none", num_cores=2, costs=TRUE_COSTS, fixed=Kind())


@dataclass
class Bench:
    """Observations of a simulated machine."""

    inputs: Inputs = INPUTS

    def closed(self, num_clients: int, num_tokens: int = 20, role: Role = "calibration") -> Observed:
        plan = LoadPlan(role=role, num_clients=num_clients, num_tokens=num_tokens, seconds=0.5)
        kind = Kind(num_steps=num_tokens - 1)
        turn = Machine(self.inputs, 2).closed(num_clients, plan.seconds, kind, self.inputs.costs)
        costs = self.inputs.costs
        engine_ms = 1e3 * (costs.prompt_s + kind.num_steps * (costs.step_s + kind.num_rows * costs.row_s))
        return Observed(plan=plan, turns=[msgspec.structs.replace(turn, engine_ms=[engine_ms] * len(turn.wall_ms))])

    def open(self, rate_qps: float, role: Role, speeds: Sequence[float] = (), seconds: float = 4.0) -> Observed:
        """
        Args:
            speeds: of the machine, each for `SPAN_S`; its CPU accounting shows them.
        """
        offsets_s = arrival_offsets_s(random.Random(1), rate_qps, seconds)
        turn = Machine(self.inputs, 2, speeds).open(offsets_s, Kind(), self.inputs.costs)
        plan = LoadPlan(role=role, rate_qps=rate_qps, seconds=seconds)
        spans = [Span(100, 100 * turn.cpu_s_per_answer / speed) for speed in speeds]
        return Observed(plan=plan, turns=[msgspec.structs.replace(turn, offsets_s=offsets_s, spans=spans)])

    def observations(self, *loads: Observed) -> Observations:
        return Observations(
            models="none",
            commit="none",
            measured_at="never",
            machine=COMPUTER,
            num_slots=2,
            num_prompt_tokens=64,
            max_others_share=0.1,
            loads=list(loads),
        )


@pytest.fixture(scope="module")
def observations() -> Observations:
    bench = Bench()
    return bench.observations(
        bench.closed(1, num_tokens=1), bench.closed(1),
        bench.open(15.0, "calibration"), bench.open(38.0, "calibration"),
        bench.open(25.0, "check"), bench.open(45.0, "check"),
    )  # fmt: skip


def test_fitted_costs_are_as_fast_as_the_measured_ones(observations: Observations) -> None:
    inputs = fit(observations)
    for load in observations.of("calibration"):
        if load.plan.num_clients:
            assert simulated_s(inputs, load.plan, 2) == pytest.approx(mean_s(load), rel=0.08), load.plan.name
    assert inputs.costs.gateway_s == pytest.approx(TRUE_COSTS.gateway_s, rel=0.1)
    assert all(row.is_met for row in check(inputs, observations))


def test_the_true_costs_pass_the_check_exactly_and_others_do_not(observations: Observations) -> None:
    for row in check(INPUTS, observations):
        assert row.errors == pytest.approx((0.0, 0.0), abs=1e-6)
    slower = msgspec.structs.replace(INPUTS, costs=msgspec.structs.replace(TRUE_COSTS, prompt_s=0.012))
    assert not any(row.is_met for row in check(slower, observations))


def test_a_machine_whose_speed_changes_is_simulated_with_its_speeds() -> None:
    load = Bench().open(40.0, "check", speeds=[0.7, 1.0, 1.2, 0.8, 1.0, 0.7, 1.1, 0.9])
    [row] = check(INPUTS, Bench().observations(load))
    assert row.errors == pytest.approx((0.0, 0.0), abs=0.03)
    [turn] = load.turns
    constant = Observed(plan=load.plan, turns=[msgspec.structs.replace(turn, spans=[])])
    [row] = check(INPUTS, Bench().observations(constant))
    assert abs(row.errors[1]) > 0.1


def test_a_load_with_refused_requests_is_not_met() -> None:
    load = Bench().open(20.0, "check")
    [turn] = load.turns
    refused = Observed(plan=load.plan, turns=[msgspec.structs.replace(turn, num_failed=1)])
    assert [row.is_met for row in check(INPUTS, Bench().observations(load))] == [True]
    assert [row.is_met for row in check(INPUTS, Bench().observations(refused))] == [False]


def test_a_disturbed_turn_does_not_count() -> None:
    turns = [Turn(wall_ms=[1.0], elapsed_s=1.0, others_share=share) for share in (0.5, 0.02, 0.3)]
    load = Observed(plan=LoadPlan(role="check", rate_qps=1.0, seconds=1.0), turns=turns)
    [kept] = Bench().observations(load).of("check")
    assert [turn.others_share for turn in kept.turns] == [0.02]


def test_a_keys_costs_are_what_was_accounted() -> None:
    turn = Turn(
        wall_ms=[20.0] * 100,
        engine_ms=[12.0] * 100,
        elapsed_s=8.0,
        gateway_cpu_s=0.4,
        workers_cpu_s=1.5,
        client_cpu_s=0.1,
    )
    plan = LoadPlan(role="calibration", num_writers=4, keys_per_s=3.0, seconds=8.0)
    inputs = fit_key(INPUTS, Bench().observations(Observed(plan=plan, turns=[turn])))
    assert inputs.key is not None
    assert inputs.key_costs is not None
    costs, kind = inputs.key_costs, inputs.key
    engine_s = costs.prompt_s + kind.num_steps * (costs.step_s + kind.num_rows * costs.row_s)
    assert 0.006 <= engine_s <= 0.012
    assert (costs.gateway_s, costs.client_s) == pytest.approx((0.004, 0.001))
    assert costs.worker_s + engine_s == pytest.approx(0.015)


def test_writers_type_bursts_and_pauses() -> None:
    keys = press_keys(random.Random(3), 200, 60.0)
    assert len(keys) / 200 / 60.0 == pytest.approx(keys_per_s(), rel=0.1)
    assert [key.offset_s for key in keys] == sorted(key.offset_s for key in keys)
    assert {key.writer for key in keys} == set(range(200))
