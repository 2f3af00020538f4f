"""What this machine's CPU is, which instructions it has, and in which dtypes it can compute.

`read` is the only place that looks at the CPU's features, so a test that replaces it stands for another CPU. Does not
import torch: what is planned without torch must get the same answers as a worker.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# The flags that decide which matrix kernels a CPU can run: of x86, then of ARM.
KERNEL_FLAGS = (
    *("avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx_vnni", "avx_ne_convert"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimddp", "i8mm", "bf16", "sve"),
)
# Instructions that multiply bf16, of x86 and ARM. oneDNN also emulates them, which is slower than fp32.
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """One that the CPU kernels are compiled for.

    Attributes:
        name: also of its header in `workers/engine/cpu/kernel_source/sets`.
        machine: architecture, x86_64 or aarch64.
        compiler_cpu: what the compiler may use.
        flags: what a CPU needs, by Linux's names.
        title: for people.
    """

    name: str
    machine: str
    compiler_cpu: str
    flags: frozenset[str]
    title: str


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
_AVX512_CPU = "x86_64+avx2+fma+f16c+avx512f+avx512bw+avx512dq+avx512vl+avx512vnni+amx_tile+amx_int8"
# The fastest first. All compute the same bits.
INSTRUCTION_SETS = (
    InstructionSet("avx512_vnni", "x86_64", _AVX512_CPU, _AVX512, "AVX-512 VNNI"),
    InstructionSet("avx_vnni", "x86_64", "x86_64+avx2+fma+f16c+avxvnni", _AVX2 | {"avx_vnni"}, "AVX-VNNI"),
    InstructionSet("avx2", "x86_64", "x86_64+avx2+fma+f16c", _AVX2, "AVX2"),
    InstructionSet("scalar", "x86_64", "x86_64", frozenset(), "no vector instructions that the kernels know"),
    InstructionSet("neon_dotprod", "aarch64", "generic+dotprod", frozenset({"asimddp"}), "NEON with dot products"),
    InstructionSet("scalar", "aarch64", "generic", frozenset(), "NEON without dot products"),
)


@dataclass(frozen=True, slots=True)
class CpuFeatures:
    """A CPU as Linux describes it.

    Attributes:
        name: the model's name, with family, model and stepping where there are such.
        flags: all flags of its instruction sets, by Linux's names.
        prefetches_well: whether it reads ahead of a program without being told, as AMD's Zen does.
    """

    name: str
    flags: frozenset[str]
    prefetches_well: bool = False

    @property
    def kernel_flags(self) -> list[str]:
        """Those of `KERNEL_FLAGS` that the CPU has."""
        return [flag for flag in KERNEL_FLAGS if flag in self.flags]

    @property
    def has_bf16(self) -> bool:
        """Whether this CPU multiplies bf16."""
        return bool(BF16_FLAGS & self.flags)

    @property
    def instruction_sets(self) -> list[InstructionSet]:
        """Those of `INSTRUCTION_SETS` that this CPU has, the fastest first."""
        machine = platform.machine().replace("arm64", "aarch64")  # macOS's name, Linux's name
        return [found for found in INSTRUCTION_SETS if found.machine == machine and found.flags <= self.flags]


def read() -> CpuFeatures:
    """The features of the CPU that this process runs on."""
    try:
        return parse(CPUINFO.read_text(encoding="utf-8"))
    except OSError:  # not Linux, or /proc is hidden
        is_apple = sys.platform == "darwin" and platform.machine() == "arm64"  # all of Apple's ARM CPUs have it
        return CpuFeatures(platform.processor() or platform.machine(), frozenset({"asimddp"} if is_apple else ()))


def num_cores() -> int:
    """Cores that this process may use; all of the machine where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parse(cpuinfo: str) -> CpuFeatures:
    """The features of the first processor in the text of /proc/cpuinfo."""
    lines = (line.partition(":") for line in cpuinfo.partition("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    name = fields.get("model name") or platform.machine()
    numbers = " ".join(fields[field] for field in ("cpu family", "model", "stepping") if field in fields)
    if numbers:
        name += f" (family, model, stepping: {numbers})"
    flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
    return CpuFeatures(name, flags, prefetches_well=fields.get("vendor_id") == "AuthenticAMD")


def dtype_problem(cpu: CpuFeatures, dtype: str) -> str | None:
    """Why a CPU cannot compute in `dtype` (a value of TERCET_DTYPE), and what to do; None if it can."""
    if dtype == "fp16":
        return "Tercet computes no fp16 on a CPU: set TERCET_DTYPE=auto, int8, bf16 or fp32."
    if dtype == "bf16" and not cpu.has_bf16:
        return (
            f"This CPU multiplies no bf16, which needs avx512_bf16, amx_bf16 or ARM's bf16: {cpu.name} has "
            f"{', '.join(cpu.kernel_flags) or 'none of the flags that Tercet knows'}. Set "
            "TERCET_DTYPE=auto, int8 or fp32."
        )
    return None
