"""The libraries of compiled kernels: where they lie, and which one this machine loads.

`make setup`, and the build of a wheel, compile one for each instruction set of the machine's architecture
(`kernel_source.build`); a worker loads the one for its CPU. A library's name has a digest of the sources, so one that
was compiled from others is not loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shared import cpu_features
from shared.cpu_features import InstructionSet
from shared.extras import repair_command
from workers.engine.failures import LoadFailure

SOURCE = Path(__file__).parent / "cpu" / "kernel_source"
COMPILED = SOURCE.parent / "compiled"
_LAYOUTS = SOURCE.parent / "layouts.py"
# Linux: arch_prctl, and its request for a state that is not granted by default.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """The kernels for one instruction set, in memory: the addresses of the functions, and what differs between sets.

    Attributes:
        block: outputs of a packed 8-bit weight that are computed together.
        zero_point: the 8-bit activation that stands for 0.
        inverts: where a weight is negative, products invert the activation: −x − 1.
        has_amx: the CPU has AMX, and Linux has granted it to this process.
    """

    instruction_set: InstructionSet
    block: int
    zero_point: int
    inverts: bool
    has_amx: bool
    activate: int
    add_and_norm: int
    advance: int
    attend: int
    multiply: int
    run_program: int
    sample: int
    scale: int
    store_kv: int


_FUNCTIONS = ["activate", "add_and_norm", "advance", "attend", "multiply", "run_program", "sample", "scale", "store_kv"]


def load_kernels(name: str | None = None) -> Kernels:
    """The kernels for an instruction set, by default the fastest that this CPU has.

    Raises:
        LoadFailure: they are not compiled, or the CPU lacks the instructions.
    """
    cpu = cpu_features.read()
    found = next((one for one in cpu.instruction_sets if name in (None, one.name)), None)
    if found is None:
        raise LoadFailure(f"This CPU cannot run kernels for {name or platform.machine()}.")
    return _load(found, has_amx="amx_int8" in cpu.flags)


@cache
def _load(found: InstructionSet, *, has_amx: bool) -> Kernels:
    path = compiled_path(found, COMPILED, sys.platform)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LoadFailure(f"The CPU kernels are not compiled: {repair_command()}. {error}") from error

    def address(symbol: str) -> int:
        return ctypes.cast(library[symbol], ctypes.c_void_p).value or 0

    return Kernels(
        instruction_set=found,
        block=ctypes.c_int64.in_dll(library, "block_outputs").value,
        zero_point=ctypes.c_int64.in_dll(library, "zero_point").value,
        inverts=bool(ctypes.c_int64.in_dll(library, "inverts").value),
        has_amx=has_amx and found.name == "avx512_vnni" and _request_amx(),
        **{symbol: address(symbol) for symbol in _FUNCTIONS},
    )


def compiled_path(instruction_set: InstructionSet, directory: Path, system: str) -> Path:
    """Where the library lies that is compiled from these sources."""
    suffix = "dylib" if system == "darwin" else "so"
    return directory / f"{instruction_set.machine}-{instruction_set.name}-{_digest(instruction_set)}.{suffix}"


def _digest(instruction_set: InstructionSet) -> str:
    """A digest of everything that a library is compiled from."""
    digest = hashlib.sha256(instruction_set.compiler_cpu.encode())
    for path in (*sorted(path for path in SOURCE.rglob("*") if path.suffix in (".c", ".h", ".py")), _LAYOUTS):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _request_amx() -> bool:
    """Ask Linux for the use of AMX tiles in this process; false if it denies them.

    Source: "Using dynamically enabled XSTATE features" in Linux's Documentation/arch/x86/xstate.rst.
    """
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
