"""`start`: from `make serve` to the first suggestion, on an installation that has served nothing yet, and once more.

The environment is set up; HOME and caches are new, so the first start downloads and converts the default model. Set
HF_ENDPOINT to an address where nothing answers to measure without a hub.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx

from deploy.tuning.load.server import POLL_S, ROOT, START_S, free_port
from shared.errors import StartError
from tests.bench.results import Row, err

STARTS = ("first", "second")
STOP_S = 40.0
REQUEST = {"context": "Thank you for your letter. I", "length": 8, "seed": 0}


def measure_starts() -> list[Row]:
    """
    Raises:
        StartError: the server ended, or gave no suggestion in time.
    """
    with tempfile.TemporaryDirectory(prefix="tercet-bench-") as home:
        rows = []
        for start in STARTS:
            err.print(f"The {start} start …")
            rows.append(_measure(start, Path(home)))
        return rows


def _measure(start: str, home: Path) -> Row:
    port = free_port()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TERCET_", "XDG_"))}
    environ = {**own, "HOME": str(home), "TERCET_BIND": f"127.0.0.1:{port}", "TERCET_RUN_DIR": str(home / "run")}
    with (home / "log").open("wb") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            ["make", "--no-print-directory", "serve"], cwd=ROOT, env=environ, stdout=log, stderr=log, process_group=0
        )
    try:
        while time.monotonic() - began < START_S:
            if process.poll() is not None:
                raise StartError(f"make serve ended with {process.returncode}: {(home / 'log').read_text()[-1000:]}")
            if model := _model_that_suggests(port):
                return {"start": start, "seconds": round(time.monotonic() - began, 2), "model": model}
            time.sleep(POLL_S)
        raise StartError(f"make serve gave no suggestion in {START_S:.0f} s.")
    finally:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
        process.wait(STOP_S)


def _model_that_suggests(port: int) -> str:
    try:
        answer = httpx.post(f"http://127.0.0.1:{port}/autocomplete", json=REQUEST, timeout=STOP_S, trust_env=False)
    except httpx.TransportError:
        return ""
    return str(answer.json()["model"]) if answer.is_success else ""
