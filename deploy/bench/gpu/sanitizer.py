"""compute-sanitizer on the kernels' self-check and one step, as stages `memcheck` and `racecheck`."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from deploy.bench.gpu.commands import run_command
from deploy.bench.gpu.context import LOGS, Context
from deploy.bench.gpu.record import Skipped

TOOL = "compute-sanitizer"
PLACES = (Path("/usr/local/cuda/bin"), Path("/opt/nvidia/compute-sanitizer"))


def sanitize(context: Context, tool: str) -> dict[str, Any]:
    """Run one step of the embedded checkpoint under a tool of compute-sanitizer.

    Raises:
        Skipped: there is no tool, or no GPU.
    """
    if context.is_rehearsal:
        raise Skipped(f"{TOOL} needs a GPU; the program that it runs is rehearsed in stage `cold`")
    path = shutil.which(TOOL) or next((str(place / TOOL) for place in PLACES if (place / TOOL).is_file()), None)
    if path is None:
        raise Skipped(f"{TOOL} is not on the PATH nor in {', '.join(map(str, PLACES))}")
    command = [
        *(path, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--print-limit", "20"),
        *(sys.executable, "-m", "deploy.bench.gpu.one_step", context.device, "bf16"),
    ]
    done = run_command(command, context.limit_s - 5)
    (context.out / LOGS / f"{tool}-output.log").write_text(done.output)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", done.output)
    if done.code is None:
        raise RuntimeError(f"{tool} did not end within {context.limit_s - 5:.0f} s; last: {done.last_line[:200]}")
    last = summary[-1] if summary else done.last_line[:200]
    return {"exit_code": done.code, "is_clean": done.code == 0, "summary": last}
