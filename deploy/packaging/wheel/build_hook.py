"""Compiles the CPU kernels into a wheel, for every instruction set of the machine's architecture.

hatchling loads it by its path. The compiler and numpy are in `build-system.requires`.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED = "tercet/_app/workers/engine/cpu/compiled"


class KernelsHook(BuildHookInterface):  # type: ignore[misc] # hatchling is not installed where mypy runs
    """Builds wheels; an editable installation has what `make setup` compiled."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._scratch = tempfile.TemporaryDirectory()  # removed with this hook, after the wheel was written
        command = [sys.executable, "-m", "workers.engine.cpu.kernel_source.build", "--directory", self._scratch.name]
        subprocess.run(command, cwd=self.root, check=True)
        for library in Path(self._scratch.name).iterdir():
            build_data["force_include"][str(library)] = f"{COMPILED}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"


def _platform_tag() -> str:
    """The kernels need no library of the system; the loader must know the format that `build` compiles for."""
    machine = platform.machine()
    return f"macosx_11_0_{machine}" if sys.platform == "darwin" else f"manylinux_2_28_{machine}"
