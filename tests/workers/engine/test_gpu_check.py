"""A worker's refusal of GPUs that its torch does not serve. There is no GPU: torch's answers are those of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from shared.gpu_builds import BUILDS, Build, Capability
from workers.engine.devices import check_gpu
from workers.engine.failures import LoadFailure
from workers.engine.foreign_errors import load_failure
from workers.engine.loader import load_model


def fake_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: Capability, build: Build = BUILDS[2]) -> None:
    monkeypatch.setattr(torch.version, "cuda", build.cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: build.architectures)


@pytest.mark.parametrize(
    ("name", "capability", "build", "dtype", "reason"),
    [
        ("Tesla T4", (7, 5), BUILDS[2], "bf16", "Tesla T4 .* computes no bf16: set TERCET_DTYPE=fp16 or auto"),
        ("Tesla V100", (7, 0), BUILDS[2], "auto", "Tesla V100 .* CUDA 13.0 .*/cu126"),
        ("NVIDIA B200", (10, 0), BUILDS[0], "auto", "NVIDIA B200 .*/cu132"),
        # The worker knows no driver: the build for the oldest one.
        ("Tesla T4", (7, 5), Build("own", "13.0", ("sm_80",)), "auto", r"Tesla T4 .*torch==[\d.]+\+cu126 .*/cu126"),
    ],
)
def test_a_gpu_that_torch_does_not_serve_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    capability: Capability,
    build: Build,
    dtype: str,
    reason: str,
) -> None:
    """Before any file is read: there is none."""
    fake_gpu(monkeypatch, name, capability, build)
    with pytest.raises(LoadFailure, match=reason) as refused:
        load_model(tmp_path, device="cuda", dtype=dtype)
    assert load_failure(refused.value, "cuda") is refused.value


def test_a_build_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadFailure, match="built without CUDA"):
        check_gpu("cuda", "auto")


@pytest.mark.parametrize(
    ("name", "capability", "is_noted"),
    [("NVIDIA H100", (9, 0), False), ("NVIDIA L4", (8, 9), True), ("a newer GPU", (13, 0), True)],
)
def test_a_gpu_between_or_beyond_the_compiled_architectures_is_noted(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: Capability, is_noted: bool
) -> None:
    fake_gpu(monkeypatch, name, capability)
    with capture_logs() as logs:
        check_gpu("cuda", "bf16")
    assert bool(logs) == is_noted
