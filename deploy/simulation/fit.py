"""Chooses the model's costs so that calibration runs are as fast as measured. Never sees a run of the check.

What CPU accounting and the answers themselves report is taken as it is; the costs that they cannot separate are
searched by coordinate descent. Pure.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean, median

import msgspec

from deploy.load.rounds import percentile
from deploy.simulation.costs import Costs, Inputs, Kind
from deploy.simulation.observations import LoadPlan, Observations, Observed, Turn
from deploy.simulation.runs import Machine
from deploy.simulation.writers import press_keys
from workers.predictor import MAX_TOKENS, NUM_PATHS

SEARCHED = ("prompt_s", "step_s", "row_s", "change_s", "worker_s", "waited_share", "contention")
FIRST_FACTOR, LAST_FACTOR = 1.3, 1.05
MIN_COST_S = 1e-6
BOUNDS = {"waited_share": 1.0}  # of searched costs
NUM_TURNS = 2  # of each open loop that the search simulates
NUM_ENGINE_SHARES = 20
# A prediction computes eight paths of up to eight tokens after the newest token of a cached context
# (`workers.predictor`); paths that become unlikely end earlier, so the measured time is spread over these steps.
KEY = Kind(prompt_tokens=1, num_rows=NUM_PATHS, num_steps=MAX_TOKENS - 1)


def fit(observations: Observations) -> Inputs:
    """The costs of fixed-length requests.

    The search compares open loops: p50, p99 and the workers' CPU time per answer. Closed loops alone would not do:
    their clients wait for each other, so their batches change rarely, and a decode step costs less.

    Raises:
        ValueError: the observations lack a calibration run.
    """
    loads = observations.of("calibration")
    [short] = [load for load in loads if load.plan.num_clients == 1 and load.plan.num_tokens == 1]
    [single] = [load for load in loads if load.plan.num_clients == 1 and load.plan.num_tokens > 1]
    opened = [load for load in loads if load.plan.rate_qps]
    inputs = Inputs(
        source=f"{observations.commit}, {observations.measured_at}, {observations.machine.cpu}",
        models=observations.models,
        num_cores=observations.machine.cores,
        costs=_first_costs(short, single, opened),
        fixed=Kind(prompt_tokens=observations.num_prompt_tokens, num_steps=single.plan.num_tokens - 1),
    )
    chosen = [_typical_turns(load) for load in opened]
    usual_s = [median(turn.cpu_s_per_answer for turn in load.turns) for load in opened]
    single_s = mean_s(single)

    def loss(costs: Costs) -> float:
        tried = msgspec.structs.replace(inputs, costs=costs)
        errors = [math.log(simulated_s(tried, single.plan, observations.num_slots) / single_s)]
        for turns, cpu_s in zip(chosen, usual_s, strict=True):
            simulated = [
                Machine(tried, observations.num_slots, turn.speeds(cpu_s)).open(turn.offsets_s, inputs.fixed, costs)
                for turn in turns
            ]
            errors += [
                math.log(fmean(map(figure, simulated)) / fmean(map(figure, turns)))
                for figure in (_p50, _p99, _workers_s)
            ]
        return fmean(error**2 for error in errors)

    return msgspec.structs.replace(inputs, costs=descend(inputs.costs, SEARCHED, loss))


def _typical_turns(load: Observed) -> list[Turn]:
    """The turns whose CPU time per answer is next to the median."""
    usual_s = median(turn.cpu_s_per_answer for turn in load.turns)
    return sorted(load.turns, key=lambda turn: abs(turn.cpu_s_per_answer - usual_s))[:NUM_TURNS]


def _p50(turn: Turn) -> float:
    return percentile(turn.wall_ms, 0.5)


def _p99(turn: Turn) -> float:
    return percentile(turn.wall_ms, 0.99)


def _workers_s(turn: Turn) -> float:
    return turn.workers_cpu_s / len(turn.wall_ms)


def mean_s(load: Observed) -> float:
    """Average latency of a closed loop, median over the turns."""
    return median(1e-3 * fmean(turn.wall_ms) for turn in load.turns)


def simulated_s(inputs: Inputs, plan: LoadPlan, num_slots: int) -> float:
    """Average latency of a closed loop in the model."""
    kind = msgspec.structs.replace(inputs.fixed, num_steps=plan.num_tokens - 1)
    return 1e-3 * fmean(Machine(inputs, num_slots).closed(plan.num_clients, plan.seconds, kind, inputs.costs).wall_ms)


def descend(costs: Costs, names: Sequence[str], loss: Callable[[Costs], float]) -> Costs:
    """Coordinate descent: each cost is multiplied by a factor or its inverse while that helps; the factor shrinks."""
    best, lowest = costs, loss(costs)
    factor = FIRST_FACTOR
    while factor > LAST_FACTOR:
        has_improved = False
        for name in names:
            for step in (factor, 1 / factor):
                value = min(getattr(best, name) * step, BOUNDS.get(name, math.inf))
                tried = msgspec.structs.replace(best, **{name: value})
                if (found := loss(tried)) < lowest:
                    best, lowest, has_improved = tried, found, True
                    break
        if not has_improved:
            factor = math.sqrt(factor)
    return best


def _first_costs(short: Observed, single: Observed, opened: Sequence[Observed]) -> Costs:
    """What the answers and the CPU accounting report.

    Args:
        short: one client, one token: a prefill and no decode step.
        single: one client.
        opened: open loops.
    """
    engine_s, short_engine_s = (
        median(1e-3 * ms for turn in load.turns for ms in turn.engine_ms) for load in (single, short)
    )
    step_s = max(MIN_COST_S, engine_s - short_engine_s) / (single.plan.num_tokens - 1)
    client_s = median(turn.client_cpu_s / len(turn.wall_ms) for load in opened for turn in load.turns)
    gateway_s = median(turn.gateway_cpu_s / len(turn.wall_ms) for load in opened for turn in load.turns)
    worker_s = median(turn.workers_cpu_s / len(turn.wall_ms) for turn in short.turns) - short_engine_s
    overhead_s = median(
        1e-3 * (wall - engine)
        for turn in single.turns
        for wall, engine in zip(turn.wall_ms, turn.engine_ms, strict=True)
    )
    waited_share = min(1.0, max(0.1, (overhead_s - client_s) / (gateway_s + worker_s)))
    return Costs(
        gateway_s=gateway_s,
        worker_s=max(MIN_COST_S, worker_s),
        client_s=client_s,
        waited_share=waited_share,
        prefill_s=MIN_COST_S,
        prompt_s=short_engine_s,
        step_s=step_s / 2,
        row_s=step_s / 6,
        change_s=step_s / 6,
        contention=0.1,
    )


def fit_key(inputs: Inputs, observations: Observations) -> Inputs:
    """Add the costs of a live writer's key: what the answers and the CPU accounting report.

    Which share of the engine's reported time was computing is chosen so that the simulated p50 is the measured one.

    Raises:
        ValueError: the observations lack a calibration run with writers.
    """
    [load] = [load for load in observations.of("calibration") if load.plan.num_writers]
    num_keys = sum(len(turn.wall_ms) for turn in load.turns)
    gateway_s, workers_s, client_s = (
        sum(cpu_s) / num_keys
        for cpu_s in (
            [turn.gateway_cpu_s for turn in load.turns],
            [turn.workers_cpu_s for turn in load.turns],
            [turn.client_cpu_s for turn in load.turns],
        )
    )
    engine_s = median(1e-3 * ms for turn in load.turns for ms in turn.engine_ms)
    overhead_s = median(
        1e-3 * (wall - engine) for turn in load.turns for wall, engine in zip(turn.wall_ms, turn.engine_ms, strict=True)
    )
    worker_s = max(MIN_COST_S, workers_s - engine_s)
    kind = KEY
    step_s = engine_s / (kind.num_steps + 1)  # the last token of the prompt is computed like a step
    row_share = inputs.costs.row_s / (inputs.costs.step_s + inputs.costs.row_s * inputs.fixed.num_rows)
    row_s = step_s * row_share / (1 + row_share * (kind.num_rows - inputs.fixed.num_rows))
    costs = Costs(
        gateway_s=gateway_s,
        worker_s=worker_s,
        client_s=client_s,
        waited_share=min(1.0, max(0.1, (overhead_s - client_s) / (gateway_s + worker_s))),
        prefill_s=MIN_COST_S,
        prompt_s=step_s,
        step_s=step_s - kind.num_rows * row_s,
        row_s=row_s,
    )
    shares = [1.0 - number / NUM_ENGINE_SHARES for number in range(NUM_ENGINE_SHARES // 2 + 1)]
    tried = [msgspec.structs.replace(inputs, key=kind, key_costs=_with_engine(costs, share)) for share in shares]
    measured_ms = load.median_ms(0.5)
    return min(tried, key=lambda each: abs(_typed_ms(each, load, observations.num_slots) - measured_ms))


def _with_engine(costs: Costs, share: float) -> Costs:
    """The engine's times as reported include what delayed it: keep a share. The worker's CPU time stays the same."""
    engine_s = costs.prompt_s + KEY.num_steps * (costs.step_s + KEY.num_rows * costs.row_s)
    worker_s = costs.worker_s + (1 - share) * engine_s
    return msgspec.structs.replace(
        costs,
        prompt_s=share * costs.prompt_s,
        step_s=share * costs.step_s,
        row_s=share * costs.row_s,
        worker_s=worker_s,
        waited_share=costs.waited_share * (costs.gateway_s + costs.worker_s) / (costs.gateway_s + worker_s),
    )


def _typed_ms(inputs: Inputs, load: Observed, num_slots: int) -> float:
    """Simulated p50 of a load with writers."""
    assert inputs.key is not None
    assert inputs.key_costs is not None
    keys = press_keys(random.Random(1), load.plan.num_writers, load.plan.seconds)
    return median(Machine(inputs, num_slots).written(keys, inputs.key, inputs.key_costs).wall_ms)
