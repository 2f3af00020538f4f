"""The kernels that `tercet plan` shows. A script stands in for `nvidia-smi`, as there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.stored_kernels import NOT_CHECKED, stored_kernels
from shared.plan import Model, Plan, Slot
from tests.settings import make_settings
from workers.checkpoints.resolve import resolve
from workers.engine.cuda.kernel_store import Gpu, KernelStore, StoredChoice, kernel_key
from workers.engine.loader import read_config
from workers.engine.model.config import SHAPES

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), "580.65.06")
EMBEDDED = resolve("embedded")


def plan_of(*devices: str) -> Plan:
    embedded = Model("embedded", str(EMBEDDED.directory), "embedded", EMBEDDED.n_ctx, EMBEDDED.vocab_size)
    synthetic = Model("synthetic:small", str(EMBEDDED.directory), "synthetic", 1024, 50257)
    names = (embedded.name, synthetic.name)
    places = [(device, name) for device in devices for name in names]
    slots = [Slot(index, device, name, f"/{index}", 48) for index, (device, name) in enumerate(places)]
    return Plan({}, [embedded, synthetic], slots)


def describe_gpu(directory: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """A machine whose `nvidia-smi` describes each GPU by `line`, and knows only --id=0."""
    script = directory / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n[ \"$1\" = --id=0 ] || exit 6\necho '{line}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_the_choice_is_found_by_the_key_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_gpu(tmp_path, monkeypatch, "9.0, 580.65.06, NVIDIA H100 80GB HBM3")
    settings, store, plan = make_settings(cache_dir=tmp_path), KernelStore(tmp_path), plan_of("cuda:0")
    assert stored_kernels(plan, settings, {}) == [([0, 1], NOT_CHECKED)]
    store.write(kernel_key(H100, read_config(Path(EMBEDDED.directory)), "bf16"), StoredChoice("triton"))
    store.write(kernel_key(H100, SHAPES["small"], "bf16"), StoredChoice("torch", "attend differs"))
    assert stored_kernels(plan, settings, {}) == [([0], "triton"), ([1], "torch: attend differs")]
    store.write(kernel_key(H100, SHAPES["small"], "bf16"), StoredChoice("fused"))  # of an older version
    assert stored_kernels(plan, settings, {}) == [([0], "triton"), ([1], NOT_CHECKED)]
    other_dtype = make_settings(cache_dir=tmp_path, dtype="fp16")
    assert stored_kernels(plan, other_dtype, {}) == [([0, 1], NOT_CHECKED)]
    assert stored_kernels(plan, make_settings(cache_dir=tmp_path, compute="cpu"), {}) == []


def test_a_running_or_ended_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_gpu(tmp_path, monkeypatch, "9.0, 580.65.06, NVIDIA H100 80GB HBM3")
    for shape in (read_config(Path(EMBEDDED.directory)), SHAPES["small"]):
        KernelStore(tmp_path).write(kernel_key(H100, shape, "bf16"), StoredChoice("checking"))
    [(_, kernels)] = stored_kernels(plan_of("cuda:0"), make_settings(cache_dir=tmp_path), {})
    assert kernels.startswith(NOT_CHECKED)


def test_gpus_without_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_gpu(tmp_path, monkeypatch, "12.0, 590.1, NVIDIA B200")
    settings = make_settings(cache_dir=tmp_path)
    [(slots, newer), (others, unknown)] = stored_kernels(plan_of("cuda:0", "cuda:1"), settings, {})
    assert (slots, others) == ([0, 1], [2, 3])
    assert newer.startswith("torch: ")
    assert "12.0" in newer
    assert unknown.startswith("unknown")
    assert stored_kernels(plan_of("cpu"), settings, {}) == []


def test_a_visible_device_is_indexed_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_gpu(tmp_path, monkeypatch, "9.0, 580.65.06, NVIDIA H100 80GB HBM3")
    settings = make_settings(cache_dir=tmp_path)
    assert stored_kernels(plan_of("cuda:1"), settings, {"CUDA_VISIBLE_DEVICES": "3,0"}) == [([0, 1], NOT_CHECKED)]


@pytest.mark.parametrize("line", ["", "No devices were found", "[N/A], 580.65.06, NVIDIA H100"])
def test_an_unknown_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    describe_gpu(tmp_path, monkeypatch, line)
    [(_, kernels)] = stored_kernels(plan_of("cuda:0"), make_settings(cache_dir=tmp_path), {})
    assert kernels.startswith("unknown")
