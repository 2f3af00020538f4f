"""The order of the search, what it leaves out, and what it recommends. The machines follow a formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from deploy.tuning.tune.results import MIB, Candidate, Measurement
from deploy.tuning.tune.search import MAX_STABLE_SHARE, Goal, Outcome, Search, Space, choose, next_final
from tests.deploy.tuning.tune.figures import at_load, candidate, measurement


def space(
    cores: int = 2, devices: tuple[str, ...] = ("cpu",), free_mib: float | None = 20_000, max_clients: int = 8
) -> Space:
    return Space(devices, cores, None if free_mib is None else int(free_mib * MIB), max_clients, num_samples=3)


def search(
    machine: Callable[[Candidate], Outcome], found: Space, goal: Goal | None = None
) -> tuple[dict[Candidate, Outcome], Search]:
    """Runs a search to its end; the plans in the order in which they were measured first."""
    outcomes: dict[Candidate, Outcome] = {}
    state = Search(found, outcomes, goal or Goal())
    for _, one in state.plans():
        assert one not in state.pruned
        outcomes[one] = again(outcomes[one]) if one in outcomes else machine(one)
    return outcomes, state


def again(outcome: Outcome) -> Outcome:
    """The outcome after one more pass with the same figures."""
    assert isinstance(outcome, Measurement)
    return replace(outcome, num_passes=outcome.num_passes + 1)


def machine_of(speed: Callable[[Candidate], float]) -> Callable[[Candidate], Measurement]:
    """A machine on which a plan's latencies are those of `measurement`, divided by its speed; 800 ms at the load."""
    return lambda one: measurement(
        [ms / speed(one) for ms in (50, 60, 100, 200)], 500, one.num_workers, at_load(800 / speed(one))
    )


def chosen(outcomes: dict[Candidate, Outcome], goal: Goal) -> tuple[Candidate, str]:
    """The plan that is recommended, and why."""
    found = choose(outcomes, goal)
    assert found is not None
    return found.candidate, found.reason


def test_workers_and_threads_come_first_then_placement_then_the_batch() -> None:
    outcomes, _ = search(machine_of(lambda one: one.workers**0.5), space())
    assert [(one.workers, one.threads, one.placement, one.max_batch) for one in outcomes] == [
        (1, 2, "auto", 48),
        (1, 1, "auto", 48),
        (2, 1, "auto", 48),
        (4, 1, "auto", 48),
        (4, 1, "spread", 48),
        (4, 1, "auto", 3),
    ]


@pytest.mark.parametrize(
    ("speed", "free_mib", "left_out", "reason"),
    [
        (lambda one: min(one.workers, 2), 20_000, (8, 1), "4 workers answered 80.0 requests/s at most, 2 80.0"),
        (lambda one: one.threads, 20_000, (1, 2), "fewer threads were worse already"),
        (lambda one: one.workers, 1900, (4, 2), "memory: 4 × 500 MiB"),
    ],
    ids=["more workers that answer no more", "fewer threads that were worse", "workers that do not fit"],
)
def test_what_cannot_win_is_left_out(
    speed: Callable[[Candidate], float], free_mib: float, left_out: tuple[int, int], reason: str
) -> None:
    outcomes, state = search(machine_of(speed), space(cores=8, free_mib=free_mib))
    assert reason in state.pruned[candidate(*left_out)]
    measured = {(one.workers, one.threads) for one in outcomes}
    assert left_out not in measured
    assert (left_out[0] // 2, left_out[1]) in measured or (left_out[0], 2 * left_out[1]) in measured


def test_a_plan_that_cannot_be_served_ends_the_growth() -> None:
    """As where the slot plan refuses workers that do not fit on a GPU, whose free memory the search does not know."""

    def machine(one: Candidate) -> Outcome:
        return "cuda:0 does not hold it" if one.workers > 2 else measurement(num_workers=one.num_workers)

    outcomes, _ = search(machine, space(cores=0, devices=("cuda:0", "cuda:1"), free_mib=None))
    by_workers = {one.workers: outcome for one, outcome in outcomes.items() if one.placement == "auto"}
    assert [*by_workers] == [1, 2]  # two workers answered no more than one
    outcomes, state = search(lambda one: "no driver", space(cores=0, devices=("cuda:0",), free_mib=None))
    assert [one.workers for one in outcomes] == [1]
    assert state.pruned[Candidate(("cuda:0",), 2, 0, 48, "auto")] == "1 worker cannot be served"
    assert choose(outcomes, Goal()) is None


def test_a_larger_batch_is_measured_where_the_load_fills_the_default() -> None:
    outcomes, _ = search(machine_of(lambda one: 1), space(max_clients=32))
    assert {one.max_batch for one in outcomes} == {48, 96}


def test_the_search_continues_from_what_was_measured() -> None:
    outcomes, _ = search(machine_of(lambda one: one.workers), space())
    known = dict(list(outcomes.items())[:3])
    assert next(Search(space(), known, Goal()).plans())[1] == list(outcomes)[3]


def test_workers_are_added_until_the_slo_holds() -> None:
    outcomes, state = search(machine_of(lambda one: one.workers), space(cores=4), Goal(600, 50))
    assert max(one.workers for one in outcomes) == 2
    assert "2 workers hold the SLO" in state.pruned[candidate(4)]
    outcomes, _ = search(machine_of(lambda one: one.workers), space(cores=4), Goal(300, 50))
    assert max(one.workers for one in outcomes) == 4


def test_the_best_two_are_measured_again_in_turns() -> None:
    close, worse = measurement((51, 61, 101, 205)), measurement((100, 120, 200, 400))
    outcomes: dict[Candidate, Outcome] = {candidate(1): measurement(), candidate(2): close, candidate(4): worse}
    turns = []
    while (final := next_final(outcomes, Goal())) is not None:
        turns.append(final.workers)
        outcomes[final] = again(outcomes[final])
    assert turns == [1, 2, 1, 2]
    assert next_final({candidate(1): measurement(), candidate(4): worse}, Goal()) is None
    assert next_final({candidate(1): measurement()}, Goal()) is None


@pytest.mark.parametrize(("qps", "num_errors", "is_planned"), [(29, 0, True), (31, 0, False), (25, 1, False)])
def test_a_load_near_the_capacity_or_with_errors_is_not_planned_with(
    qps: float, num_errors: int, is_planned: bool
) -> None:
    outcomes = {candidate(): measurement(at_load=at_load(60, num_errors=num_errors))}
    assert (choose(outcomes, Goal(qps=qps)) is not None) == is_planned


def test_without_a_goal_the_most_requests_win_then_the_latency_then_the_cost() -> None:
    slow_start = measurement((100, 110, 120, 160))  # 50 requests/s
    quick_start = measurement((50, 60, 100, 163))  # 49 requests/s
    outcomes: dict[Candidate, Outcome] = {
        candidate(1): measurement(),
        candidate(2): slow_start,
        candidate(3): quick_start,
        candidate(4): quick_start,
    }
    plan, reason = chosen(outcomes, Goal())
    assert plan == candidate(3)
    assert "answers 49.1 requests/s" in reason
    assert "of 3 such plans" in reason


def test_an_slo_at_a_load_finds_the_cheapest_plan_that_holds_it() -> None:
    outcomes: dict[Candidate, Outcome] = {
        candidate(1): measurement((50, 60, 100, 200), at_load=at_load(150)),
        candidate(2): measurement((40, 45, 60, 110), num_workers=2, at_load=at_load(70)),
        candidate(4): measurement((30, 32, 40, 60), num_workers=4, at_load=at_load(45)),
    }
    for slo_ms, cheapest in ((1000, 1), (150, 1), (149, 2), (69, 4)):
        assert chosen(outcomes, Goal(slo_ms, 25))[0] == candidate(cheapest)
    assert choose(outcomes, Goal(40, 25)) is None
    assert choose(outcomes, Goal(1000, 500)) is None


def test_of_plans_with_equal_workers_the_one_with_fewer_bytes_is_cheaper() -> None:
    outcomes: dict[Candidate, Outcome] = {
        candidate(1, 2): measurement(at_load=at_load(60)),
        candidate(1, 1): measurement(worker_mib=300, at_load=at_load(60)),
    }
    assert chosen(outcomes, Goal(600, 5))[0] == candidate(1, 1)


def test_an_slo_alone_finds_the_most_requests_within_it() -> None:
    outcomes: dict[Candidate, Outcome] = {
        candidate(1): measurement((50, 60, 100, 200)),
        candidate(2): measurement((150, 155, 160, 170)),
    }
    for slo_ms, workers, qps in ((55, 1, 20), (120, 1, MAX_STABLE_SHARE * 40), (600, 2, MAX_STABLE_SHARE * 8e3 / 170)):
        plan, reason = chosen(outcomes, Goal(slo_ms))
        assert plan == candidate(workers)
        assert reason.startswith(f"holds an average of {slo_ms} ms up to {qps:.1f} requests/s")
    assert choose(outcomes, Goal(30)) is None


def test_a_load_alone_finds_the_lowest_latency() -> None:
    outcomes: dict[Candidate, Outcome] = {
        candidate(1): measurement((50, 60, 100, 200), at_load=at_load(90)),
        candidate(2): measurement((70, 72, 80, 100), at_load=at_load(75)),
    }
    assert [chosen(outcomes, Goal(qps=qps))[0] for qps in (5, 35)] == [candidate(2)] * 2
    outcomes[candidate(2)] = measurement((70, 72, 80, 100), at_load=at_load(91))
    plan, reason = chosen(outcomes, Goal(qps=5))
    assert plan == candidate(1)
    assert reason.startswith("measured average 90 ms at 5 requests/s")


@pytest.mark.parametrize(("cores", "counts"), [(1, [1, 2]), (2, [1, 2, 4]), (6, [1, 2, 4, 8, 12]), (0, [1, 2, 4])])
def test_worker_counts(cores: int, counts: list[int]) -> None:
    assert space(cores).worker_counts() == counts
