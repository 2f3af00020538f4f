"""The slot plan, its file, and the environment of a worker."""

import os
from pathlib import Path

import pytest

from shared.errors import StartError
from shared.plan import Model, Plan, make_slots, read_plan, write_plan
from shared.settings import Settings
from shared.worker_environment import worker_environment
from tests.settings import make_settings


def make_plan(devices: list[str], models: list[tuple[str, int]]) -> Plan:
    checkpoints = [Model(name, "/", "directory", 1024, 50257) for name, _ in models]
    return Plan({}, checkpoints, make_slots(devices, models, Path("/run"), 48))


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
    [(None, ["0", "1"]), ("5, 3", ["5", "3"]), ("GPU-aaaa,MIG-bbbb", ["GPU-aaaa", "MIG-bbbb"]), ("", ["0", "1"])],
)
def test_visible_devices_are_indexed_into(visible: str | None, expected: list[str]) -> None:
    plan = make_plan(["cuda:0", "cuda:1"], [("small", 1)])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    got = [worker_environment(slot, plan, Settings(), environ)["CUDA_VISIBLE_DEVICES"] for slot in plan.slots]
    assert got == expected


def test_gpus_are_numbered_as_nvidia_smi_numbers_them() -> None:
    """CUDA's own order puts the fastest first, so that cuda:1 would be another card than the plan's."""
    plan = make_plan(["cuda:0"], [("small", 1)])
    assert worker_environment(plan.slots[0], plan, Settings(), {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert worker_environment(plan.slots[0], plan, Settings(), environ)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_cpu_workers_see_no_gpu_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    plan = make_plan(["cpu"], [("small", 3)])
    environment = worker_environment(plan.slots[1], plan, Settings(), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert (environment["OMP_NUM_THREADS"], environment["TERCET_SLOT"]) == ("2", "1")
    assert worker_environment(plan.slots[1], plan, make_settings(cpu_threads=5), {})["OMP_NUM_THREADS"] == "5"
    assert "TRITON_CACHE_DIR" not in environment
    caches = worker_environment(plan.slots[1], plan, make_settings(cache_dir=Path("/var/cache/tercet")), {})
    assert caches["TRITON_CACHE_DIR"] == "/var/cache/tercet/triton"


def test_a_small_model_computes_on_one_thread() -> None:
    model = Model("tiny", "/", "embedded", 1024, 8192, weight_bytes=14_000_000)
    [slot] = make_slots(["cpu"], [("tiny", 1)], Path("/run"), 48)
    plan = Plan({}, [model], [slot])
    assert worker_environment(slot, plan, Settings(), {})["OMP_NUM_THREADS"] == "1"
    assert worker_environment(slot, plan, make_settings(cpu_threads=2), {})["OMP_NUM_THREADS"] == "2"


def test_a_written_plan_is_read_back(tmp_path: Path) -> None:
    plan = make_plan(["cpu"], [("small", 2)])
    write_plan(plan, tmp_path)
    assert read_plan(tmp_path) == plan
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(StartError, match="no slot plan"):
        read_plan(tmp_path)
