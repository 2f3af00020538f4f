"""Stage `cold`: the start of a runner on a machine without a C compiler and with an empty Triton cache.

A worker must start there with the same kernels as elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from deploy.bench.gpu.commands import run_command
from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import Recorder

COMPILER = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|c89|c99|clang|clang\+\+|cpp|ld|tcc|icx)(-[\d.]+)?")


def run(context: Context, record: Recorder) -> None:
    record.measure("as it is", lambda: _start(context, dict(os.environ)))
    record.measure("no compiler, empty cache", lambda: _without_compiler(context))


def _without_compiler(context: Context) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tercet-cold-") as directory:
        tools, cache = Path(directory, "bin"), Path(directory, "cache")
        tools.mkdir()
        for place in os.environ.get("PATH", "").split(os.pathsep):
            for path in sorted(Path(place).iterdir()) if place and Path(place).is_dir() else []:
                if COMPILER.fullmatch(path.name) is None and not (tools / path.name).exists():
                    (tools / path.name).symlink_to(path)
        environ = {name: value for name, value in os.environ.items() if name not in {"CC", "CXX"}}
        environ |= {"PATH": str(tools), "TRITON_CACHE_DIR": str(cache), "TRITON_HOME": str(cache)}
        return _start(context, environ) | {"num_cached_files": sum(1 for path in cache.rglob("*") if path.is_file())}


def _start(context: Context, environ: dict[str, str]) -> dict[str, Any]:
    dtype = "fp32" if context.is_rehearsal else "bf16"
    command = [sys.executable, "-m", "deploy.bench.gpu.one_step", context.device, dtype]
    done = run_command(command, context.limit_s / 2, environ)
    if done.code != 0:
        raise RuntimeError(f"ended with {done.code}: {done.last_line[:300]}")
    found: dict[str, Any] = json.loads(done.last_line)
    return found
