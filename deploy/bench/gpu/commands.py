"""Programs that a stage starts: bounded in time, ended with the stage, their output kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deploy.load.server import ROOT

# Becomes the program, which is killed when the stage dies for any reason: prctl(PR_SET_PDEATHSIG, SIGKILL).
BECOME = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Done:
    """How a program ended. `code` is None if it was ended after its limit."""

    code: int | None
    output: str

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1] if lines else ""


def run_command(command: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None) -> Done:
    """Run a program from the root of this checkout; standard output and error together.

    Exit code 1 if there is no such program.
    """
    own = dict(os.environ) if environ is None else dict(environ)
    own["PYTHONPATH"] = os.pathsep.join(path for path in (str(ROOT), own.get("PYTHONPATH", "")) if path)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", BECOME, *command],
        cwd=ROOT, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", process_group=0,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=max(1.0, limit_s))
        return Done(process.returncode, output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Done(None, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
