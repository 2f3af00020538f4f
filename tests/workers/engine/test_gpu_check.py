"""A worker's refusal of GPUs that its torch does not serve. There is no GPU: torch's answers are those of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from workers.engine.failures import LoadFailure
from workers.engine.foreign_errors import load_failure
from workers.engine.gpu_check import check_gpu
from workers.engine.loader import load_model

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], cuda: str | None, architectures: list[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "architectures", "dtype", "texts"),
    [
        ("Tesla T4", (7, 5), "13.0", CU130, "bf16", ("Tesla T4", "computes no bf16", "fp16 or auto")),
        ("Tesla V100", (7, 0), "13.0", CU130, "auto", ("Tesla V100", "CUDA 13.0", "cu126")),
        ("NVIDIA B200", (10, 0), "12.6", CU126, "auto", ("NVIDIA B200", "cu132")),
    ],
)
def test_a_gpu_that_torch_does_not_serve_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    capability: tuple[int, int],
    cuda: str,
    architectures: list[str],
    dtype: str,
    texts: tuple[str, ...],
) -> None:
    """Before any file is read: there is none."""
    fake_gpu(monkeypatch, name, capability, cuda, architectures)
    with pytest.raises(LoadFailure) as refused:
        load_model(tmp_path, device="cuda", dtype=dtype)
    for text in texts:
        assert text in refused.value.detail
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
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], is_noted: bool
) -> None:
    fake_gpu(monkeypatch, name, capability, "13.0", CU130)
    with capture_logs() as logs:
        check_gpu("cuda", "bf16")
    assert bool(logs) == is_noted
