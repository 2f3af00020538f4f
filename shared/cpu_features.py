"""What this machine's CPU is, which instructions it has, and in which dtypes it can compute.

`read` is the only place that looks at the CPU's features, so a test that replaces it stands for another CPU. Does not
import torch: what is planned without torch must get the same answers as a worker.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# The flags that decide which matrix kernels a CPU can run: of x86, then of ARM.
KERNEL_FLAGS = (
    *("avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx_vnni", "avx_ne_convert"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimddp", "i8mm", "bf16", "sve"),
)
# oneDNN multiplies bf16 with any of these groups, and raises an error without: the first is AVX-512 as of Skylake-SP,
# the second AVX-NE-CONVERT, the third ARM's.
BF16_FLAGS = (frozenset({"avx512bw", "avx512dq", "avx512vl"}), frozenset({"avx_ne_convert"}), frozenset({"bf16"}))


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """A CPU as Linux describes it.

    Attributes:
        name: the model's name, with family, model and stepping where there are such.
        flags: all flags of its instruction sets, by Linux's names.
    """

    name: str
    flags: frozenset[str]

    @property
    def kernel_flags(self) -> list[str]:
        """Those of `KERNEL_FLAGS` that the CPU has."""
        return [flag for flag in KERNEL_FLAGS if flag in self.flags]

    @property
    def has_bf16(self) -> bool:
        """Whether oneDNN multiplies bf16 on this CPU."""
        return any(flags <= self.flags for flags in BF16_FLAGS)

    @property
    def has_avx512_vnni(self) -> bool:
        return "avx512_vnni" in self.flags


def read() -> CpuFeatures:
    """The features of the CPU that this process runs on."""
    try:
        return parse(CPUINFO.read_text(encoding="utf-8"))
    except OSError:  # not Linux, or /proc is hidden
        return CpuFeatures(platform.processor() or platform.machine(), frozenset())


def parse(cpuinfo: str) -> CpuFeatures:
    """The features of the first processor in the text of /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    name = fields.get("model name") or platform.machine()
    numbers = " ".join(fields[field] for field in ("cpu family", "model", "stepping") if field in fields)
    if numbers:
        name += f" (family, model, stepping: {numbers})"
    return CpuFeatures(name, frozenset(fields.get("flags", fields.get("Features", "")).split()))


def dtype_problem(cpu: CpuFeatures, dtype: str) -> str | None:
    """Why a CPU cannot compute in `dtype` (a value of TERCET_DTYPE), and what to do; None if it can."""
    if dtype == "fp16":
        return "Tercet computes no fp16 on a CPU: set TERCET_DTYPE=auto, int8, bf16 or fp32."
    if dtype == "bf16" and not cpu.has_bf16:
        return (
            f"This CPU computes no bf16, which needs AVX-512 (avx512bw, avx512dq, avx512vl), AVX-NE-CONVERT or ARM's "
            f"bf16: {cpu.name} has {', '.join(cpu.kernel_flags) or 'none of the flags that Tercet knows'}. Set "
            "TERCET_DTYPE=auto, int8 or fp32."
        )
    return None
