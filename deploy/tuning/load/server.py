"""The server under test: `tercet serve` on a free port, in a temporary run directory.

Knows processes and the page of slots. Does not know which requests the server gets.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from shared.errors import StartError

ROOT = Path(__file__).parents[3]
START_S = 600.0
STOP_S = 40.0
POLL_S = 0.01
SHOWN_LOG_CHARS = 3000
# Becomes `tercet serve`, which gets SIGTERM when the benchmark dies for any reason: prctl(PR_SET_PDEATHSIG, SIGTERM).
SERVE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
os.execv(sys.executable, [sys.executable, "-P", "-m", "deploy", "serve"])
"""


class Server:
    """One running instance; a context manager that starts and stops it.

    `first_start_s` is the age of the first slot's worker when it was warm, by the kernel's clock.
    """

    def __init__(self, models: str, settings: Mapping[str, str], root: Path = ROOT) -> None:
        """
        Args:
            models: the value of `TERCET_MODELS`.
            root: the checkout to serve, this one or another.
            settings: further settings by lower-case name, like {"dtype": "fp32"}. The caller's TERCET_ variables are
                ignored, so that the result document lists all settings in effect.
        """
        self._base = Path(tempfile.mkdtemp(prefix="tercet-bench-"))
        self._log = self._base / "log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
        self._environ = {
            **own,
            **{f"TERCET_{name.upper()}": value for name, value in {"models": models, **settings}.items()},
            "TERCET_BIND": f"127.0.0.1:{self.port}",
            "TERCET_RUN_DIR": str(self._base / "run"),
            # What the caller's has besides: the packages of a machine where none can be installed.
            "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        }
        self._client = httpx.Client(base_url=self.url, trust_env=False, timeout=10)

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVE],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C is for the benchmark, which then stops the server
            )
        try:
            self.first_start_s = self._age_when_warm()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._base, ignore_errors=True)

    def slots(self) -> list[dict[str, Any]]:
        """The rows of `/slots`; empty while the gateway does not answer."""
        try:
            slots: list[dict[str, Any]] = self._client.get("/slots").json().get("slots", [])
        except (httpx.TransportError, ValueError):
            return []
        return slots

    def processes(self) -> dict[int, int]:
        """All its processes, each with the id of its parent."""
        return descendants(self._process.pid)

    def _age_when_warm(self, other_than: int = 0) -> float:
        """The age of the first slot's worker once all slots are warm and none is served by the process `other_than`.

        Raises:
            StartError: the server ended, could not load its model, or was not warm in time.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise StartError(f"The server under test ended ({self._process.returncode}):\n{self._log_end()}")
            slots = self.slots()
            are_new = all(slot["pid"] != other_than for slot in slots)
            if slots and are_new and all(slot["state"] == "warm" for slot in slots):
                pid = slots[0]["pid"]
                return process_age_s(pid) if pid else math.nan  # a pool on Ray has no process of its own
            reason = next((slot["reason"] for slot in slots if slot["state"] == "failed"), None)
            if reason and are_new:  # a predecessor that has failed is shown until its process has ended
                raise StartError(f"The server under test could not load its model: {reason}\n{self._log_end()}")
            time.sleep(POLL_S)
        raise StartError(f"The server under test was not warm within {START_S:g} s:\n{self._log_end()}")

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-SHOWN_LOG_CHARS:]


def descendants(pid: int, parent: int | None = None) -> dict[int, int]:
    """A process and all its descendants, each with the id of its parent. What ends meanwhile counts as childless."""
    found = {pid: os.getpid() if parent is None else parent}
    for task in Path("/proc").glob(f"{pid}/task/*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in (task / "children").read_text().split():
                found |= descendants(int(child), pid)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def process_age_s(pid: int) -> float:
    """Seconds since a process was forked: the boot-time clock minus field 22 (starttime) of /proc/<pid>/stat."""
    assert sys.platform == "linux"
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started_at_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at_s
