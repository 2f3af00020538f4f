"""The model against queueing theory, and what it does with superseded and refused requests."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest
import simpy

from deploy.simulation.cores import Cores, Steps
from deploy.simulation.costs import Costs, Inputs, Kind
from deploy.simulation.model import Gateway, Request, Slot
from deploy.simulation.runs import Machine

PREFILL_S = 1e-4  # for a token: a prompt of 100 tokens takes 10 ms
COSTS = Costs(gateway_s=0.0, worker_s=0.0, prefill_s=PREFILL_S, step_s=0.0)
FREE = Costs(gateway_s=0.0, worker_s=0.0, prefill_s=0.0, step_s=0.01)
SERVICE_S = 0.01
NUM_REQUESTS = 4_000
NUM_COMPUTATIONS = 20_000


def waits_s(num_slots: int, rate_qps: float, kinds: list[Kind]) -> list[float]:
    """Time from arrival to answer of Poisson arrivals, one request at a time in each slot."""
    rng = random.Random(7)
    env = simpy.Environment()
    cores = Cores(env, num_slots)
    gateway = Gateway(env, cores, [Slot(env, cores, max_batch=3) for _ in range(num_slots)], queue=10**6)
    times_s: list[float] = []

    def send(kind: Kind) -> Steps:
        start_s = env.now
        request = Request.of(env, kind, COSTS)
        env.process(gateway.answer(request))
        yield request.delivered
        times_s.append(env.now - start_s)

    def arrive() -> Steps:
        for kind in kinds:
            yield env.timeout(rng.expovariate(rate_qps))
            env.process(send(kind))

    env.process(arrive())
    env.run()
    return times_s


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_constant_service_times_wait_as_in_an_m_d_1_queue(load: float) -> None:
    """Pollaczek–Khinchine: the mean wait is ρ·S ÷ (2·(1 − ρ))."""
    times_s = waits_s(1, load / SERVICE_S, [Kind(prompt_tokens=100, num_steps=0)] * NUM_REQUESTS)
    expected_s = SERVICE_S + load * SERVICE_S / (2 * (1 - load))
    assert mean(times_s) == pytest.approx(expected_s, rel=0.05)


@pytest.mark.parametrize(("num_slots", "load"), [(1, 0.7), (2, 0.7), (4, 0.8)])
def test_exponential_service_times_wait_as_in_an_m_m_c_queue(num_slots: int, load: float) -> None:
    """Erlang's C formula."""
    rng = random.Random(11)
    kinds = [Kind(prompt_tokens=max(1, round(rng.expovariate(1 / 100))), num_steps=0) for _ in range(NUM_REQUESTS)]
    rate_qps = num_slots * load / SERVICE_S
    offered = num_slots * load
    last = offered**num_slots / math.factorial(num_slots) / (1 - load)
    waiting = last / (sum(offered**n / math.factorial(n) for n in range(num_slots)) + last)
    expected_s = SERVICE_S + waiting * SERVICE_S / (num_slots * (1 - load))
    assert mean(waits_s(num_slots, rate_qps, kinds)) == pytest.approx(expected_s, rel=0.08)


@pytest.mark.parametrize("num_cores", [1, 2])
def test_shared_cores_delay_as_in_a_processor_sharing_queue(num_cores: int) -> None:
    """M/G/1-PS: S ÷ (1 − ρ), whatever the distribution. With two cores: the M/M/2 queue, which has the same number of
    requests in the system."""
    rng = random.Random(13)
    env = simpy.Environment()
    cores = Cores(env, num_cores)
    load, times_s = 0.6, []

    def compute() -> Steps:
        start_s = env.now
        yield cores.compute(rng.expovariate(1 / SERVICE_S))
        times_s.append(env.now - start_s)

    def arrive() -> Steps:
        for _ in range(NUM_COMPUTATIONS):
            yield env.timeout(rng.expovariate(num_cores * load / SERVICE_S))
            env.process(compute())

    env.process(arrive())
    env.run()
    expected_s = SERVICE_S / (1 - load) if num_cores == 1 else SERVICE_S / (1 - load**2)
    assert mean(times_s) == pytest.approx(expected_s, rel=0.06)
    assert cores.busy_s == pytest.approx(NUM_COMPUTATIONS * SERVICE_S, rel=0.03)


def test_busy_cores_slow_each_other_down_by_the_contention() -> None:
    env = simpy.Environment()
    cores = Cores(env, 2, contention=0.5)
    alone = cores.compute(1.0)
    env.run(alone)
    assert env.now == pytest.approx(1.0)
    both = env.all_of([cores.compute(1.0), cores.compute(1.0)])
    env.run(both)
    assert env.now == pytest.approx(2.5)


def test_speeds_are_replayed() -> None:
    env = simpy.Environment()
    cores = Cores(env, 1, speeds=[1.0, 0.5], speed_s=1.0)
    env.run(cores.compute(2.0))
    assert env.now == pytest.approx(2.5)  # 1 s at 1, 1 s at 0.5, half a second at 1


def test_requests_of_a_batch_share_the_steps() -> None:
    """A decode step takes as long for two requests as for one, where rows cost nothing."""
    env = simpy.Environment()
    slot = Slot(env, Cores(env, 1), max_batch=48)
    requests = [Request.of(env, Kind(num_steps=10), FREE) for _ in range(2)]
    for request in requests:
        slot.submit(request)
    env.run(env.all_of([request.ended for request in requests]))
    assert env.now == pytest.approx(0.1)


def test_a_newer_request_of_a_session_frees_the_slot_of_the_older() -> None:
    machine = Machine(Inputs(source="", models="", num_cores=2, max_batch=3, costs=FREE, fixed=Kind()), 1)
    first, second, other = (
        Request.of(machine.env, Kind(num_steps=steps), FREE, session)
        for steps, session in ((1000, 1), (10, 1), (10, 2))
    )
    machine.env.process(machine.send(first))
    machine.env.run(0.05)
    machine.env.process(machine.send(other))  # waits for the slot, which holds one request
    machine.env.run(0.1)
    assert machine.slots[0].in_flight == 3
    machine.env.process(machine.send(second))
    machine.env.run()
    assert first.is_superseded
    assert other.is_answered
    assert second.is_answered
    assert machine.num_superseded == 1
    assert len(machine.wall_ms) == 2
    assert machine.slots[0].in_flight == 0
    assert machine.env.now < 0.4


def test_a_waiting_request_can_be_superseded() -> None:
    machine = Machine(Inputs(source="", models="", num_cores=2, max_batch=3, costs=FREE, fixed=Kind()), 1)
    requests = [Request.of(machine.env, Kind(num_steps=10), FREE, session) for session in (1, 2, 2)]
    for request in requests:
        machine.env.process(machine.send(request))
    machine.env.run()
    assert [request.is_superseded for request in requests] == [False, True, False]
    assert machine.slots[0].in_flight == 0


def test_a_full_queue_refuses() -> None:
    machine = Machine(Inputs(source="", models="", num_cores=2, max_batch=3, queue=3, costs=FREE, fixed=Kind()), 1)
    requests = [Request.of(machine.env, Kind(num_steps=10), FREE) for _ in range(4)]
    for request in requests:
        machine.env.process(machine.send(request))
    machine.env.run()
    assert [request.is_refused for request in requests] == [False, False, True, True]
    assert machine.num_refused == 2


def test_a_turn_is_deterministic() -> None:
    costs = Costs(gateway_s=0.004, worker_s=0.006, client_s=0.001, prefill_s=3e-4, step_s=0.003, row_s=1e-4)
    inputs = Inputs(source="", models="", num_cores=2, costs=costs, fixed=Kind())
    turns = [Machine(inputs, 2, [1.0, 0.9, 1.1]).closed(4, 1.0, inputs.fixed, costs) for _ in range(2)]
    assert turns[0] == turns[1]
    assert turns[0].gateway_cpu_s == pytest.approx(0.004 * len(turns[0].wall_ms), rel=0.1)
