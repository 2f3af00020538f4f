"""Programs that a run or a stage starts: bounded in time, ended with their parent, their output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.tuning.load.server import ROOT

STOP_S = 10.0  # from SIGTERM to SIGKILL
# Becomes the program, which is killed when its parent dies for any reason: prctl(PR_SET_PDEATHSIG, SIGKILL).
BECOME = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended. `code` is None if it was ended after its limit."""

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else "no output"


def run_command(
    command: Sequence[str], limit_s: float, log: Path, environment: Mapping[str, str] | None = None
) -> Done:
    """Run a program from the root of this checkout; standard output and error go to `log`, which is replaced.

    After its limit, and if this process is ended, the program gets SIGTERM, then its process group SIGKILL. Exit code 1
    if there is no such program.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", BECOME, *command],
            cwd=ROOT,
            env={**os.environ, **(environment or {}), "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            process_group=0,
        )
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(max(1.0, limit_s))
    finally:
        process.terminate()  # nothing if it has ended
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Done(code, log.read_text(errors="replace"))
