"""Compiles the kernels for each instruction set: `python -m workers.engine.cpu.kernel_source.build <directory>`.

The compiler is clang as the package `ziglang` has it: no system compiler is needed, and it compiles for other machines,
too. It is needed at set-up only.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from shared.cpu_features import INSTRUCTION_SETS, InstructionSet
from workers.engine.cpu import layouts
from workers.engine.cpu_kernels import SOURCE, compiled_path

# Nothing may change the order of floating-point operations or fuse them: the sources say where they are fused.
OPTIONS = (
    *("-O3", "-std=gnu2x", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffreestanding", "-nostdlib", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=all", "-g0", "-s"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-psabi"),
)
_TYPES = {"i8": "int64_t", "f8": "double", "f4": "float"}


def header() -> str:
    """`layouts.py` as C: its records as structs, its numbers as constants."""
    lines = ["/* From layouts.py. */", "#pragma once", "#include <stdint.h>"]
    for name, value in vars(layouts).items():
        if isinstance(value, int | float) and name.isupper():
            lines.append(f"#define {name} {value}")
        elif isinstance(value, np.dtype) and value.names:
            fields = [f"{_TYPES[kind.base.str[1:]]} {field}{_length(kind)};" for field, kind in _fields(value)]
            lines.append(f"typedef struct {{ {' '.join(fields)} }} {name.title().replace('_', '')};")
    return "\n".join(lines) + "\n"


def _fields(record: np.dtype[np.void]) -> list[tuple[str, np.dtype[np.generic]]]:
    assert record.names is not None
    assert record.fields is not None
    return [(name, record.fields[name][0]) for name in record.names]


def _length(kind: np.dtype[np.generic]) -> str:
    return "".join(f"[{length}]" for length in kind.shape)


def build(instruction_set: InstructionSet, directory: Path, system: str, options: Sequence[str] = ()) -> Path:
    """Compile the kernels.

    Args:
        directory: for the library.
        system: the operating system, `linux` or `darwin`.
        options: further options of the compiler.

    Raises:
        RuntimeError: the compiler failed; the message has its output.
    """
    path = compiled_path(instruction_set, directory, system)
    target = f"{instruction_set.machine}-" + ("macos" if system == "darwin" else "linux-gnu.2.28")
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "layouts.h").write_text(header(), encoding="utf-8")
        library = Path(scratch) / path.name
        command = [
            *(sys.executable, "-m", "ziglang", "cc", "-target", target, f"-mcpu={instruction_set.compiler_cpu}"),
            *(*OPTIONS, "-I", scratch, "-I", str(SOURCE), *options),
            *(f'-DINSTRUCTION_SET="sets/{instruction_set.name}.h"', str(SOURCE / "all.c"), "-o", str(library)),
        ]
        if system == "darwin":
            command.append("-Wl,-undefined,dynamic_lookup")
        # The compiler keeps what it compiled in a cache, by default in the home directory, which there may not be.
        environ = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": scratch, "ZIG_LOCAL_CACHE_DIR": scratch}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the CPU kernels for {instruction_set.name} could not be compiled:\n{done.stderr}")
        directory.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(library.read_bytes())
        part.replace(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workers.engine.cpu.kernel_source.build", description=__doc__)
    parser.add_argument("--directory", type=Path, default=SOURCE.parent / "compiled", help="for the libraries")
    parser.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64")
    parser.add_argument("--system", default=sys.platform, help="linux or darwin")
    args = parser.parse_args()
    sets = [found for found in INSTRUCTION_SETS if found.machine == args.machine.replace("arm64", "aarch64")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = set(pool.map(lambda found: build(found, args.directory, args.system), sets))
    for old in set(args.directory.iterdir()) - paths:
        old.unlink()


if __name__ == "__main__":
    main()
