"""The plan, what a worker's environment becomes, and leases that follow slots through crashes and reloads."""

import os
from pathlib import Path

import pytest

from shared.errors import StartError
from shared.leases import Leases
from shared.plan import Model, Plan, lay_out, read_plan, worker_environment, write_plan
from shared.settings import Settings


def make_plan(devices: list[str], models: list[tuple[str, int]]) -> Plan:
    checkpoints = [Model(name, "/", "directory", 1024, 50257) for name, _ in models]
    return Plan({}, checkpoints, lay_out(devices, models, Path("/run"), 48))


def test_slots_go_device_by_device_with_counts_per_device() -> None:
    plan = make_plan(["cuda:0", "cuda:1"], [("small", 2), ("medium", 1)])
    assert [(slot.index, slot.device, slot.model) for slot in plan.slots] == [
        (0, "cuda:0", "small"),
        (1, "cuda:0", "small"),
        (2, "cuda:0", "medium"),
        (3, "cuda:1", "small"),
        (4, "cuda:1", "small"),
        (5, "cuda:1", "medium"),
    ]
    assert len({slot.socket for slot in plan.slots}) == 6


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1"]), ("5,3", ["5", "3"]), ("GPU-aaaa,MIG-bbbb", ["GPU-aaaa", "MIG-bbbb"]), ("", ["0", "1"])],
)
def test_visible_devices_are_indexed_into(visible: str | None, expected: list[str]) -> None:
    plan = make_plan(["cuda:0", "cuda:1"], [("small", 1)])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    got = [worker_environment(slot, plan, Settings(), environ)["CUDA_VISIBLE_DEVICES"] for slot in plan.slots]
    assert got == expected


def test_cpu_workers_see_no_gpu_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    plan = make_plan(["cpu"], [("small", 3)])
    environment = worker_environment(plan.slots[1], plan, Settings(), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert (environment["OMP_NUM_THREADS"], environment["TERCET_SLOT"]) == ("2", "1")
    assert worker_environment(plan.slots[1], plan, Settings(cpu_threads=5), {})["OMP_NUM_THREADS"] == "5"


def test_a_tiny_model_computes_on_one_thread() -> None:
    model = Model("tiny", "/", "embedded", 1024, 8192, weight_bytes=14_000_000)
    [slot] = lay_out(["cpu"], [("tiny", 1)], Path("/run"), 48)
    plan = Plan({}, [model], [slot])
    assert worker_environment(slot, plan, Settings(), {})["OMP_NUM_THREADS"] == "1"
    assert worker_environment(slot, plan, Settings(cpu_threads=2), {})["OMP_NUM_THREADS"] == "2"


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = make_plan(["cpu"], [("small", 2)])
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path) == plan
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(StartError, match="no slot plan"):
        read_plan(tmp_path)


def test_a_crashed_workers_slot_is_leased_again_whatever_the_age() -> None:
    leases = Leases(3)
    assert [leases.lease(age) for age in (1, 2, 3)] == [0, 1, 2]
    for dead, reborn in ((2, 4), (4, 5), (1, 6), (5, 7)):
        slot = next(slot for slot in range(3) if dead in leases.holders(slot))
        leases.free(dead)
        assert leases.lease(reborn) == slot


def test_a_reload_gives_each_slot_a_second_generation() -> None:
    leases = Leases(2)
    for age in (1, 2):
        leases.mark_warm(leases.lease(age), age)
    assert not leases.is_superseded(0, 1)
    assert [leases.lease(age) for age in (3, 4)] == [0, 1]
    assert leases.is_superseded(0, 1)
    assert not leases.successor_is_warm(0, 1)
    leases.mark_warm(0, 3)
    assert leases.successor_is_warm(0, 1)
    assert not leases.is_superseded(0, 3)


def test_an_incoming_generation_that_dies_is_leased_its_slot_again() -> None:
    leases = Leases(2)
    for age in (1, 2, 3, 4):
        leases.lease(age)
    leases.free(3)
    assert not leases.is_superseded(0, 1)
    assert leases.lease(5) == 0


def test_deaths_before_warm_are_counted_until_one_gets_warm() -> None:
    leases = Leases(1)
    for age in (1, 2):
        leases.lease(age)
        leases.free(age)
    assert leases.num_failures(0) == 2
    leases.lease(3)
    leases.mark_warm(0, 3)
    assert leases.num_failures(0) == 0
    leases.free(3)
    assert leases.num_failures(0) == 0


def test_leases_are_seen_across_fork() -> None:
    leases = Leases(1)
    leases.lease(1)
    child = os.fork()
    if child == 0:
        leases.mark_warm(0, 2)
        os._exit(0)
    os.waitpid(child, 0)
    assert leases.successor_is_warm(0, 1)
