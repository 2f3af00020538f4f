"""CPUs that a test can pretend to run on: as /proc/cpuinfo describes them, shortened."""

from __future__ import annotations

import pytest

from shared import cpu_features

ZEN_3 = cpu_features.parse(
    "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 80\nmodel name\t: AMD Ryzen 7 5800U\nstepping\t: 0\n"
    "flags\t\t: fpu sse4_2 fma avx f16c avx2 sha_ni vaes\n\nprocessor\t: 1\n"
)
SKYLAKE_SP = cpu_features.parse(
    "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Intel(R) Xeon(R) Gold 6154 CPU @ 3.00GHz\n"
    "stepping\t: 4\nflags\t\t: fpu avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n"
)


def pretend(monkeypatch: pytest.MonkeyPatch, cpu: cpu_features.CpuFeatures) -> None:
    """Make everything in this process that asks for the CPU's features see `cpu`."""
    monkeypatch.setattr(cpu_features, "read", lambda: cpu)
