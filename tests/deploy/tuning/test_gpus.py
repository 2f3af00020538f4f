"""The GPUs of a machine, as a real executable named `nvidia-smi` describes them. There is no GPU: its output and the
device nodes are the tests' own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from deploy.tuning import gpus, planning
from deploy.tuning.gpus import check_gpus, list_gpus
from deploy.tuning.planning import count_gpus
from shared import gpu_builds
from shared.errors import StartError
from shared.setting_values import ModelSpec
from tests.programs import gpu_row, write_program
from tests.settings import make_settings

Install = Callable[[str], None]
T4 = gpu_row("Tesla T4", "7.5")
V100 = gpu_row("Tesla V100-SXM2-16GB", "7.0")
SECOND_V100 = gpu_row("Tesla V100-SXM2-16GB", "7.0", gpu="1, GPU-bbbb")
K80 = gpu_row("Tesla K80", "3.7", "470.82.01")
H100 = gpu_row("NVIDIA H100 80GB HBM3")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts an `nvidia-smi` with this shell script as its body into the only directory of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return partial(write_program, tmp_path / "nvidia-smi")


def print_rows(*rows: str) -> str:
    return "\n".join(f"echo '{row}'" for row in rows)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device node exists."""
    node = tmp_path / "nvidia0"
    node.touch()
    monkeypatch.setattr(list_gpus, "__defaults__", (((str(tmp_path / "nvidia[0-9]*"),),), 1.0))
    return node


FAILURES: dict[str, tuple[str | None, str]] = {
    "missing": (None, "is not installed"),
    "fails": ("exit 9", "fails"),
    "hangs": ("exec /bin/sleep 30", "does not answer within 1 s"),
    "prints nothing": ("exit 0", "lists no GPU"),
    "prints something else": ("echo No devices were found", "lists no GPU"),
}


@pytest.mark.parametrize(("body", "reason"), FAILURES.values(), ids=FAILURES)
def test_an_nvidia_smi_that_fails_is_an_error_where_a_device_node_exists(
    install: Install, nodes: Path, body: str | None, reason: str
) -> None:
    if body is not None:
        install(body)
    with pytest.raises(StartError, match=reason) as refused:
        count_gpus({})
    for text in (str(nodes), "driver", "--gpus all", "TERCET_DEVICES=cpu"):
        assert text in str(refused.value)
    nodes.unlink()
    assert count_gpus({}) == 0


def test_wsl_has_a_gpu_of_nvidia_only_with_its_library(install: Install, tmp_path: Path) -> None:
    install("exit 9")
    group = (str(tmp_path / "dxg"), str(tmp_path / "libcuda.so*"))
    (tmp_path / "dxg").touch()
    assert list_gpus(nodes=[group]) == []
    (tmp_path / "libcuda.so.1").touch()
    with pytest.raises(StartError, match="dxg"):
        list_gpus(nodes=[group])


def test_gpus_are_listed_also_by_a_driver_that_knows_no_capability(install: Install) -> None:
    install(print_rows(T4, SECOND_V100))
    assert [(gpu.name, gpu.capability) for gpu in list_gpus()] == [
        ("Tesla T4", (7, 5)),
        ("Tesla V100-SXM2-16GB", (7, 0)),
    ]
    install('case "$1" in *compute_cap*) exit 2;; esac\n' + print_rows(K80.partition(", ")[2]))
    [gpu] = list_gpus()
    assert (gpu.name, gpu.driver, gpu.capability) == ("Tesla K80", "470.82.01", None)


def test_a_plan_for_cpus_asks_no_driver(install: Install, nodes: Path) -> None:
    install("exit 9")
    check_gpus(("cpu",), "auto", {})
    assert nodes.exists()


REFUSALS = {
    "T4 in bf16": (T4, "bf16", "13.0", ("cuda:0: Tesla T4 (compute capability 7.5) computes no bf16", "fp16 or auto")),
    "V100 with CUDA 13": (V100, "auto", "13.0", ("Tesla V100", "no code for this GPU", "/cu126", "docs/GPU.md")),
    "K80": (K80, "auto", "12.6", ("No build of torch", "Tesla K80", "TERCET_DEVICES")),
    "old driver": (
        H100.replace("580.65.06", "535.183.01"),
        "auto",
        "13.0",
        ("The driver 535.183.01 of NVIDIA H100", "580 or newer", "update the driver", "+cu126"),
    ),
    "older driver": (H100.replace("580.65.06", "470.1"), "auto", "12.6", ("525 or newer: update the driver (",)),
    "no CUDA": (H100, "auto", None, ("was built without CUDA", "/cu132")),
    "no CUDA on an L4": (gpu_row("NVIDIA L4", "8.9", "550.54.15"), "auto", None, ("without CUDA", "/cu126")),
    "no CUDA on a T4": (T4, "auto", None, ("without CUDA", "/cu132")),
    "no CUDA and an old driver": (T4.replace("580.65.06", "535.183.01"), "auto", None, ("without CUDA", "/cu126")),
    "no CUDA and an older driver": (T4.replace("580.65", "470.65"), "auto", None, ("to 525 or newer, then", "/cu126")),
    "a driver that no build for the card runs with": (
        gpu_row("NVIDIA B200", "10.0", "570.133.20"),
        "auto",
        "12.6",
        ("update the driver from 570.133.20 to 580 or newer, then", "/cu132"),
    ),
    "a driver of which nothing is known": (T4.replace("580.65.06", "[N/A]"), "auto", None, ("without CUDA", "/cu126")),
    "newer than the build": (gpu_row("NVIDIA B200", "10.0"), "auto", "12.6", ("NVIDIA B200", "/cu132")),
}
SERVED = {
    "T4 in fp16": (T4, "fp16", "13.0"),
    "T4": (T4, "auto", "12.8"),
    "V100": (V100, "auto", "12.6"),
    "H100": (H100, "bf16", "13.0"),
    "driver of the same major version": (H100.replace("580.65.06", "535.183.01"), "bf16", "12.8"),
    "code for 8.6 runs": (gpu_row("NVIDIA L4", "8.9"), "bf16", "13.0"),
    "the driver compiles for it": (gpu_row("NVIDIA of 2030", "15.0", "999.1"), "bf16", "13.0"),
    "a build that the table does not have": (H100, "auto", "14.1"),
}


@pytest.mark.parametrize(
    ("row", "dtype", "cuda", "texts"),
    [*REFUSALS.values(), *((*case, ()) for case in SERVED.values())],
    ids=[*REFUSALS, *SERVED],
)
def test_what_the_installed_torch_does_not_serve_is_refused_by_name_and_nothing_else(
    install: Install, monkeypatch: pytest.MonkeyPatch, row: str, dtype: str, cuda: str | None, texts: tuple[str, ...]
) -> None:
    monkeypatch.setattr(gpus, "installed_cuda", lambda: (True, cuda))
    install(print_rows(row))
    with pytest.raises(StartError) if texts else nullcontext() as refused:
        check_gpus(("cuda:0",), dtype, {})
    assert all(text in str(refused and refused.value) for text in texts)


@pytest.mark.parametrize(
    ("visible", "is_refused"), [("1", True), ("0", False), ("GPU-bb", True), ("MIG-x", False), ("", False)]
)
def test_the_gpu_that_is_checked_is_the_visible_one(
    install: Install, monkeypatch: pytest.MonkeyPatch, visible: str, is_refused: bool
) -> None:
    monkeypatch.setattr(gpus, "installed_cuda", lambda: (True, "13.0"))
    install(print_rows(T4, SECOND_V100))
    with pytest.raises(StartError, match="V100") if is_refused else nullcontext():
        check_gpus(("cuda:0",), "auto", {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.parametrize(("visible", "expected"), [("0,1", 2), ("1,2", 1), ("GPU-bb", 1), ("GPU-ffff", 0), ("void", 0)])
def test_visible_gpus_that_the_driver_does_not_list_do_not_count(install: Install, visible: str, expected: int) -> None:
    install(print_rows(T4, SECOND_V100))
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    assert gpu_builds.installed_cuda() == (True, torch.version.cuda)


def test_planning_checks_gpus(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpus, "installed_cuda", lambda: (True, "13.0"))
    install(print_rows(V100))
    settings = make_settings(run_dir=tmp_path / "run", models=(ModelSpec("embedded"),))
    with pytest.raises(StartError, match="V100"):
        planning.make_plan(settings, {name: os.environ[name] for name in ("PATH",)})


def test_mps_is_found_by_its_socket(tmp_path: Path) -> None:
    (tmp_path / "tmp/nvidia-mps").mkdir(parents=True)
    assert not gpus.has_mps({}, tmp_path)
    (tmp_path / "tmp/nvidia-mps/control").touch()
    assert gpus.has_mps({}, tmp_path)
    assert gpus.has_mps({"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}, tmp_path)
    assert not gpus.has_mps({"CUDA_MPS_PIPE_DIRECTORY": "/elsewhere"}, tmp_path)
