"""Programs: run to their end, and stand-ins for those that are not on this machine, shell scripts with their names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The headless shell needs a third less processor time than the whole browser.
_CHROMIUM_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _CHROMIUM_NAMES)), None)


def run_program(
    command: Sequence[str | Path], *, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program's exit status and what it has printed, with options of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, check=check, **options)


@contextmanager
def running_script(
    script: str, cwd: Path, environ: Mapping[str, str], log_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Commands of bash in a folder, until Ctrl-C at the end."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            ["bash", "-euc", script],
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(40)


def as_user(number: int) -> tuple[str, ...]:
    """The first words of a command of a user with no rights but to read all files: Python may lie in root's home."""
    ids = ("setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups")
    return (*ids, "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search")


def write_program(path: Path, body: str) -> None:
    """A program at `path` that runs these lines of shell."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def gpu_row(
    name: str, capability: str = "9.0", driver: str = "580.65.06", memory: str = "15360", gpu: str = "0, GPU-aaaa"
) -> str:
    """A GPU as `nvidia-smi` prints it to `deploy.tuning.gpus`.

    Args:
        memory: in MiB.
        gpu: its index and UUID.
    """
    return f"{capability}, {gpu}, {driver}, {memory}, {name}"
