"""`tercet bench setup`: the time of a first `make serve`, from a new clone without caches to the first answer.

Downloads are part of it, so the figure is also one of the network. Works with other checkouts: only `make serve` and
`GET /health/ready` are used.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
from rich.table import Table

from deploy.load.server import free_port
from shared.errors import StartError

MAX_SETUP_S = 600.0
STOP_S = 60.0
POLL_S = 0.2
SHOWN_LOG_CHARS = 3000


@dataclass(frozen=True, slots=True)
class SetupRow:
    """Seconds from `make serve` until `GET /health/ready` answers 200, one for each round."""

    checkout: str
    seconds: list[float]


def measure_setups(roots: Mapping[str, Path], num_rounds: int, on_turn: Callable[[str], None]) -> list[SetupRow]:
    """The committed state of each checkout in turn, `num_rounds` times.

    Args:
        on_turn: called with a checkout's name before each of its turns.

    Raises:
        StartError: a set-up failed, or took longer than `MAX_SETUP_S`.
    """
    rows = [SetupRow(name, []) for name in roots]
    for _ in range(num_rounds):
        for row in rows:
            on_turn(row.checkout)
            row.seconds.append(round(first_serve_s(roots[row.checkout]), 1))
    return rows


def first_serve_s(root: Path) -> float:
    """Clone `root`'s HEAD, run `make serve` there with empty caches, and stop it when it is ready.

    Raises:
        StartError: as `measure_setups`.
    """
    with tempfile.TemporaryDirectory(prefix="tercet-setup-") as base:
        clone, port = Path(base) / "tercet", free_port()
        subprocess.run(["git", "clone", "--quiet", root, clone], check=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TERCET_", "MAKE", "MFLAGS"))}
        environ = {
            **own,
            "PIP_CACHE_DIR": f"{base}/pip",
            "XDG_CACHE_HOME": f"{base}/cache",
            "TERCET_MODELS": "embedded",
            "TERCET_BIND": f"127.0.0.1:{port}",
            "TERCET_RUN_DIR": f"{base}/run",
        }
        log = Path(base) / "log"
        began = time.monotonic()
        with _running(["make", "serve", f"PYTHON={sys.executable}"], clone, environ, log) as process:
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() - began > MAX_SETUP_S:
                    shown = log.read_text(errors="replace")[-SHOWN_LOG_CHARS:]
                    raise StartError(f"{root}: `make serve` did not get ready:\n{shown}")
                time.sleep(POLL_S)
            return time.monotonic() - began


@contextmanager
def _running(
    command: Sequence[str], cwd: Path, environ: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ready(port: int) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False).status_code == httpx.codes.OK
    return False


def setup_table(rows: Sequence[SetupRow]) -> Table:
    """One row per checkout; the ratio to the last one."""
    table = Table("checkout", "median", "each", "ratio", title="First `make serve`, seconds until ready")
    for row in rows:
        ratio = f"{median(row.seconds) / median(rows[-1].seconds):.2f}" if row is not rows[-1] else ""
        table.add_row(row.checkout, f"{median(row.seconds):.1f}", ", ".join(map(str, row.seconds)), ratio)
    return table
