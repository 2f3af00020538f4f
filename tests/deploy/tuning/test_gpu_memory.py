"""The memory of GPUs in the plan: cards of a fake `nvidia-smi`, and what `tercet plan` prints and refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.supervision.rolling_reload import reload_slots
from deploy.tuning.planning import make_plan
from shared.errors import StartError
from shared.masters.run_directory import lock_run_directory
from shared.memory_plan import needed_bytes
from shared.plan import Plan, write_plan
from shared.setting_values import ModelSpec
from tests.deploy.command_line.test_cli import tercet
from tests.programs import gpu_row, write_program
from tests.settings import make_settings
from workers.engine.cuda import kv_cache
from workers.engine.cuda.kv_cache import KVCache
from workers.engine.model.config import SHAPES

T4 = gpu_row("Tesla T4", gpu="0, GPU-4a4a")
H100 = gpu_row("NVIDIA H100 80GB HBM3", memory="81559", gpu="1, GPU-9b9b")
MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5b)
  MIG 1g.5gb      Device  0: (UUID: MIG-c738)
  MIG 3g.20gb     Device  1: (UUID: MIG-a1b2)"""
SIZES = {
    "Tesla T4": 15360 << 20,
    "NVIDIA H100 80GB HBM3": 81559 << 20,
    "MIG 3g.20gb": 20 * 10**9,
    "MIG 1g.5gb": 5 * 10**9,
    "GPU of unknown memory": None,
}
FakeSmi = Callable[..., str]


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    """Puts an `nvidia-smi` first on the PATH that prints these cards, and returns the PATH."""
    path = f"{tmp_path}/bin:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)

    def install(*cards: str, listed: str = "") -> str:
        query = "\n".join(cards)
        body = f"if [ \"$1\" = -L ]; then cat <<'E'\n{listed}\nE\nelse cat <<'E'\n{query}\nE\nfi"
        write_program(tmp_path / "bin/nvidia-smi", body)
        return path

    return install


def planned(tmp_path: Path, models: str, environ: dict[str, str] | None = None, /, **settings: Any) -> Plan:
    """The plan of synthetic models, like "small*2,medium"."""
    parts = [entry.partition("*") for entry in models.split(",")]
    specs = tuple(ModelSpec(f"synthetic:{name}", None, int(count or 1)) for name, _, count in parts)
    base = make_settings(run_dir=tmp_path / "run", devices=("cuda:0",), compute="cpu", models=specs)
    return make_plan(make_settings(base, **settings), environ or {})


def test_each_worker_gets_its_part_of_the_card(tmp_path: Path, fake_smi: FakeSmi) -> None:
    fake_smi(T4, H100)
    plan = planned(tmp_path, "small,medium", devices=("cuda:0", "cuda:1"))
    assert [(gpu.device, gpu.name) for gpu in plan.gpus] == [
        ("cuda:0", "Tesla T4"),
        ("cuda:1", "NVIDIA H100 80GB HBM3"),
    ]
    for gpu in plan.gpus:
        memories = [slot.memory for slot in plan.slots if slot.device == gpu.device and slot.memory is not None]
        assert len(memories) == 2
        assert needed_bytes(memories, gpu.max_successors) < 0.9 * (gpu.memory_bytes or 0)
    assert plan.max_successors == [({0, 1}, 1), ({2, 3}, 1)]


def test_the_kv_cache_takes_exactly_what_the_plan_says(
    tmp_path: Path, fake_smi: FakeSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses torch's meta device, which allocates nothing. How much is free when a worker starts does not matter."""
    fake_smi(T4)
    plan = planned(tmp_path, "small*2,medium*2")
    for free in (14 << 30, 7 << 30):
        monkeypatch.setattr(kv_cache, "free_bytes", lambda _, free=free: free)
        for slot in plan.slots:
            assert slot.memory is not None
            config, meta = SHAPES[slot.model.removeprefix("synthetic:")], torch.device("meta")
            cache = KVCache(config, slot.max_batch, torch.float16, meta, slot.memory.cache_bytes)
            assert cache.num_bytes == slot.memory.cache_bytes


@pytest.mark.parametrize(
    ("models", "settings", "refusal"),
    [
        (
            "medium*6",
            {},
            (
                "cuda:0 (Tesla T4, 15.0 GiB) does not hold synthetic:medium*6 with TERCET_MAX_BATCH=48: set "
                "TERCET_MODELS to at most synthetic:medium*4 per device, or TERCET_MAX_BATCH to at most 16, or name "
                "GPUs with more memory in TERCET_DEVICES."
            ),
        ),
        ("small*2,medium*9", {}, "set TERCET_MODELS to at most synthetic:medium*3 and synthetic:small*2 per device"),
        ("medium", {"max_batch": 512}, "take models out of TERCET_MODELS, or TERCET_MAX_BATCH to at most"),
        ("medium*5", {}, "at most synthetic:medium*4 per device"),
        ("medium*6", {"max_batch": 17}, "TERCET_MAX_BATCH to at most 16"),
        ("small*27", {}, "or a smaller TERCET_MAX_BATCH too, or name GPUs"),
        ("medium*4", {"dtype": "fp32"}, "at most synthetic:medium*2 per device"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, fake_smi: FakeSmi, models: str, settings: dict[str, Any], refusal: str
) -> None:
    fake_smi(T4)
    with pytest.raises(StartError) as error:
        planned(tmp_path, models, **settings)
    assert refusal in str(error.value)
    # What it names fits.
    assert len(planned(tmp_path, "medium*4").slots) == 4
    assert len(planned(tmp_path, "medium*6", max_batch=16).slots) == 6


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["Tesla T4", "NVIDIA H100 80GB HBM3"]),
        ("1,0", ["NVIDIA H100 80GB HBM3", "Tesla T4"]),
        ("GPU-9b,GPU-4a4a", ["NVIDIA H100 80GB HBM3", "Tesla T4"]),
        ("MIG-a1b2,MIG-c738", ["MIG 3g.20gb", "MIG 1g.5gb"]),
        ("GPU-ffff,GPU-9b", ["GPU of unknown memory", "NVIDIA H100 80GB HBM3"]),
    ],
)
def test_cards_are_those_of_cuda_visible_devices(
    tmp_path: Path, fake_smi: FakeSmi, visible: str | None, names: list[str]
) -> None:
    fake_smi(T4, H100, listed=MIG)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    plan = planned(tmp_path, "small", environ, devices=("cuda:0", "cuda:1"))
    assert [(gpu.name, gpu.memory_bytes) for gpu in plan.gpus] == [(name, SIZES[name]) for name in names]


def test_a_card_that_does_not_report_its_memory_gets_what_serves_full_batches(
    tmp_path: Path, fake_smi: FakeSmi
) -> None:
    fake_smi(gpu_row("NVIDIA GB10", memory="[N/A]"))
    plan = planned(tmp_path, "small*2")
    assert [slot.memory and slot.memory.cache_bytes for slot in plan.slots] == [
        (48 * 255 + 1 + 16 * 1024) * 12 * 2 * 768 * 2
    ] * 2
    assert plan.max_successors == [({0, 1}, 1)]


@pytest.mark.parametrize(
    ("models", "printed"),
    [
        (
            "synthetic:small*4",
            ["Tesla T4, 15.0 GiB", "0.30", "1.33", "1.04", "2.68", "10.73", "needs 13.41 GiB", "one by one"],
        ),
        ("synthetic:medium*3", ["SIGHUP is refused", "`tercet reload` stops each worker"]),
    ],
)
def test_tercet_plan_prints_what_each_worker_gets(
    tmp_path: Path, fake_smi: FakeSmi, models: str, printed: list[str]
) -> None:
    environ = {
        "PATH": fake_smi(T4),
        "COLUMNS": "300",
        "TERCET_RUN_DIR": str(tmp_path / "run"),
        "TERCET_DEVICES": "cuda:0",
        "TERCET_COMPUTE": "cpu",
        "TERCET_MODELS": models,
    }
    done = tercet("plan", **environ)
    for text in printed:
        assert text in done.stdout


def test_tercet_reload_refuses_to_change_the_workers_memory(tmp_path: Path, fake_smi: FakeSmi) -> None:
    """Slot after slot, old and new sizes could exceed the card together."""
    fake_smi(T4)
    settings = make_settings(
        run_dir=tmp_path / "run", devices=("cuda:0",), compute="cpu", models=(ModelSpec("synthetic:small", None, 4),)
    )
    write_plan(make_plan(settings, {}), settings.run_path)
    fake_smi(H100.replace("1, GPU", "0, GPU"))
    with lock_run_directory(settings, "workers"), pytest.raises(StartError, match="shares of a GPU's memory"):
        reload_slots(settings, {}, None)
