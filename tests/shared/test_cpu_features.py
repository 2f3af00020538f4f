"""Which dtypes a CPU can compute in, by its flags."""

from __future__ import annotations

import platform

import pytest
import torch

from shared import cpu_features
from shared.cpu_features import CpuFeatures, dtype_problem
from tests.cpus import SKYLAKE_SP, ZEN_3


def test_the_features_are_those_of_the_first_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """ARM lists features and no name; a machine without /proc has no known features."""
    assert ZEN_3.name == "AMD Ryzen 7 5800U (family, model, stepping: 25 80 0)"
    assert ZEN_3.kernel_flags == ["avx2"]
    assert "sha_ni" in ZEN_3.flags
    cpu = cpu_features.parse("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm bf16\nCPU part\t: 0xd40\n\n")
    assert cpu.name
    assert cpu.kernel_flags == ["asimddp", "i8mm", "bf16"]
    assert cpu.has_bf16
    monkeypatch.setattr(cpu_features, "CPUINFO", cpu_features.CPUINFO / "absent")
    assert cpu_features.read().flags == frozenset()


@pytest.mark.parametrize(
    ("flags", "has_bf16"),
    [
        ("avx2 avx_vnni", False),
        ("avx2 avx512f", False),  # Knights Landing
        ("avx2 avx512f avx512bw avx512dq avx512vl", False),  # oneDNN emulates it, which is slower than fp32
        ("avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16", True),
        ("avx2 avx_vnni avx_ne_convert", False),  # it converts, and multiplies in fp32
        ("", False),
    ],
)
def test_bf16_needs_instructions_that_multiply_it(flags: str, *, has_bf16: bool) -> None:
    cpu = CpuFeatures("A CPU", frozenset(flags.split()))
    assert (dtype_problem(cpu, "bf16") is None) == has_bf16


def test_the_refusal_names_the_cpu_and_what_it_has() -> None:
    problem = dtype_problem(ZEN_3, "bf16")
    assert problem is not None
    assert "AMD Ryzen 7 5800U (family, model, stepping: 25 80 0) has avx2." in problem
    assert "TERCET_DTYPE=auto, int8 or fp32" in problem
    assert [dtype_problem(ZEN_3, dtype) for dtype in ("auto", "int8", "fp32")] == [None, None, None]
    assert dtype_problem(SKYLAKE_SP, "fp16") is not None


def test_this_cpu_is_described_as_torch_sees_it() -> None:
    capabilities = torch.cpu.get_capabilities()
    cpu = cpu_features.read()
    assert ("avx512_vnni" in cpu.flags) == capabilities.get("avx512_vnni", False)
    assert torch.ops.mkldnn._is_mkldnn_bf16_supported() or not cpu.has_bf16


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "sse2", ["scalar"]),
        ("x86_64", "fma f16c avx2", ["avx2", "scalar"]),
        ("x86_64", "fma f16c avx2 avx_vnni", ["avx_vnni", "avx2", "scalar"]),
        ("x86_64", "fma f16c avx2 avx512f avx512bw avx512dq avx512vl", ["avx2", "scalar"]),  # Skylake-SP
        ("x86_64", "fma f16c avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni", ["avx512_vnni", "avx2", "scalar"]),
        ("aarch64", "asimd asimddp", ["neon_dotprod", "scalar"]),
        ("arm64", "asimd", ["scalar"]),
    ],
)
def test_the_fastest_instruction_set_comes_first(
    machine: str, flags: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert [found.name for found in CpuFeatures("A CPU", frozenset(flags.split())).instruction_sets] == expected
