"""Starts a real Tercet for tests: `tercet serve` in a process, with its own port and run directory."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import psutil

from tests.faulty_workers import fault_environment
from tests.tls import Certificate

ROOT = Path(__file__).parents[2]
TERCET = (sys.executable, "-m", "deploy")
GUNICORN = (sys.executable, "-m", "gunicorn")
START_S = 180.0  # a machine that does much else takes longer than 60 s
PATIENCE_S = 30.0  # how long to wait for what takes milliseconds, before it counts as not happening


T = TypeVar("T", bound="Tercet")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Poll until a condition is true, and return its value; `what` describes it in the failure."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def exchange_bytes(port: int, *parts: bytes) -> bytes:
    """All that the server at a port sends until it closes, or resets the connection. Each part is one write."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b""
        with suppress(ConnectionError):
            for part in parts:
                sock.sendall(part)
            while received := sock.recv(1 << 16):
                data += received
        return data


def _prepare(stream: int | None) -> None:
    """Permit core files, as the shells of many systems do, and close the output where there shall be none."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    if stream is None:
        os.closerange(1, 3)


class Tercet:
    """One instance under test; by default it serves the embedded checkpoint in fp32.

    Attributes:
        root: the folder of the code that runs.
    """

    command: tuple[str, ...] = (*TERCET, "serve")
    root: Path = ROOT

    def __init__(self, base: Path, certificate: Certificate | None = None, /, **settings: str) -> None:
        """An instance with a certificate serves HTTPS, and its client trusts it. Settings that begin with `test_` are
        faults of its workers (`tests.faulty_workers`)."""
        base.mkdir(exist_ok=True)
        self.run_dir = base / "run"
        self.log_path = base / "log"
        self.port = free_port()
        self.url = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}"
        settings |= certificate.settings if certificate else {}
        faults = {name: settings.pop(name) for name in list(settings) if name.startswith("test_")}
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TERCET_")},
            "TERCET_BIND": f"127.0.0.1:{self.port}",
            "TERCET_RUN_DIR": str(self.run_dir),
            "TERCET_MODELS": "embedded",
            "TERCET_DEVICES": "cpu",
            "TERCET_DTYPE": "fp32",
            "TERCET_DRAIN_S": "0.1",
            "TERCET_JOBS": f"sqlite:{base / 'jobs.sqlite3'}",
            **{f"TERCET_{name.upper()}": value for name, value in settings.items()},
            **fault_environment(faults),
        }
        self._certificate = certificate
        self.client = self.make_client()

    def make_client(self) -> httpx.Client:
        """A client that trusts the instance's certificate and sends no key."""
        verify = self._certificate.client() if self._certificate else True
        return httpx.Client(base_url=self.url, trust_env=False, timeout=60, verify=verify)

    @property
    def key_headers(self) -> dict[str, str]:
        """The header of the instance's key, if it requires one."""
        key = self.environ.get("TERCET_API_KEY", "")
        return {"x-api-key": key} if key else {}

    @property
    def num_starts(self) -> int:
        """Starts of this instance that were announced as complete."""
        return self.log().count("Every slot is warm")

    def start(self, *command: str, pass_fds: Sequence[int] = ()) -> None:
        """Start `command` (default: the instance's) and do not wait for it; it inherits the descriptors."""
        with self.log_path.open("ab") as log:
            self.start_with(log.fileno(), *command, pass_fds=pass_fds)

    def start_with(self, stream: int | None, *command: str, pass_fds: Sequence[int] = ()) -> None:
        """As `start`, with a descriptor as standard output and standard error; None: both are closed."""
        self.process = subprocess.Popen(
            command or self.command,
            cwd=self.root,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            process_group=0,
            pass_fds=pass_fds,
            preexec_fn=partial(_prepare, stream),  # noqa: PLW1509 - it takes no lock
        )

    def run(self, *arguments: str, program: Sequence[str] = TERCET, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run `tercet` with these arguments until its end, in the instance's environment with changes."""
        return subprocess.run(
            [*program, *arguments],
            cwd=self.root,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def ready(self) -> dict[str, Any] | None:
        """The body of `/health/ready`, or None if no server answers."""
        try:
            page: dict[str, Any] = self.client.get("/health/ready").json()
        except httpx.TransportError:
            return None
        return page

    def slots(self) -> list[dict[str, Any]]:
        """The rows of `/slots`; empty if no server answers."""
        try:
            rows: list[dict[str, Any]] = self.client.get("/slots", headers=self.key_headers).json()["slots"]
        except httpx.TransportError:
            return []
        return rows

    def wait_until_warm(self) -> list[dict[str, Any]]:
        """Wait until all slots are warm; returns their states."""

        def all_warm() -> list[dict[str, Any]] | None:
            if self.process.poll() is not None:
                raise AssertionError(f"Tercet exited: {self.log()}")
            slots = self.slots()
            return slots if all(slot["state"] == "warm" for slot in slots) else None

        slots: list[dict[str, Any]] = until(all_warm, START_S, f"every slot warm; {self.log()[-3000:]}")
        return slots

    def wait_until_announced(self) -> None:
        """Wait until all slots are warm and the supervisor has said so."""
        self.wait_until_warm()
        until(lambda: self.num_starts, 10, "the supervisor's announcement")

    def stop(self) -> int:
        """Stop as Ctrl-C does; returns the exit code."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=40)

    def ask(self, context: str = "The old man looked at the sea and", **fields: Any) -> dict[str, Any]:
        response = self.client.post("/autocomplete", json={"context": context, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's events of this name."""
        complete, _, _ = self.log().rpartition("\n")  # the last line may still be being written
        lines = (json.loads(line) for line in complete.splitlines() if line.startswith("{"))
        return [line for line in lines if line.get("event") == name]

    def processes(self) -> dict[str, list[psutil.Process]]:
        """The instance's processes by role; each pool's master comes first."""
        serve = psutil.Process(self.process.pid)
        roles: dict[str, list[psutil.Process]] = {"serve": [serve]}
        for master in serve.children():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):  # dead and not yet reaped
                if os.getpgid(master.pid) != master.pid:
                    continue  # a worker whose master is dead
                if role := master.environ().get("TERCET_ROLE"):  # else forked and not yet a master
                    roles[role] = [master, *master.children()]
        return roles


def run_alone(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `tercet` without any setting but these."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    command = [*TERCET, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=own | environ, capture_output=True, text=True, timeout=120, check=False
    )


class Gunicorn(Tercet):
    """One of the two pools, started by plain gunicorn, without a supervisor."""

    command = GUNICORN

    def __init__(self, base: Path, role: str, **settings: str) -> None:
        super().__init__(base, **settings)
        self.environ["TERCET_ROLE"] = role

    def wait_until_announced(self) -> None:
        """Wait until the gateway answers, or a worker has loaded its model."""
        is_gateway = self.environ["TERCET_ROLE"] == "gateway"
        until(lambda: self.slots() if is_gateway else self.events("model_loaded"), START_S, "the pool has started")

    def stop(self) -> int:
        """Stop as a service manager does; returns the exit code."""
        self.process.terminate()
        self.client.close()
        return self.process.wait(timeout=40)


def running(base: Path, certificate: Certificate | None = None, /, **settings: str) -> AbstractContextManager[Tercet]:
    """A warm instance, as `serving` runs it."""
    return serving(Tercet(base, certificate, **settings))


@contextmanager
def serving(tercet: T) -> Iterator[T]:
    """Start an instance, wait until it is warm, and stop it at the end; a failure prints its log."""
    tercet.start()
    try:
        tercet.wait_until_announced()
        yield tercet
    except BaseException:
        sys.stderr.write(tercet.log()[-6000:])
        raise
    finally:
        assert tercet.stop() == 0
    assert "SIGSEGV" not in tercet.log()  # a retry hides a crashed worker from the client


class Background(threading.Thread):
    """A thread from its block's begin until the end.

    Attributes:
        is_over: set at the end, for which `run` is to look.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.is_over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.join(timeout=60)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process holds."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, process: psutil.Process) -> Usage:
        return cls(process.memory_info().rss, process.num_fds(), process.num_threads())


def usages(tercet: Tercet) -> dict[str, Usage]:
    """What the gateway's worker and each slot's worker hold, by name."""
    found = tercet.processes()
    named = {"gateway": found["gateway"][1]}
    slots = {slot["pid"]: slot["slot"] for slot in tercet.wait_until_warm()}
    for process in found["workers"][1:]:
        if process.pid in slots:
            named[f"slot {slots[process.pid]}"] = process
    return {name: Usage.of(process) for name, process in sorted(named.items())}


def metric(tercet: Tercet, prefix: str, mark: str = "") -> float:
    """The sum of the metrics whose name and labels begin with `prefix`, and have `mark` in them, once one may read."""
    get = partial(tercet.client.get, "/metrics", headers=tercet.key_headers)
    text = until(lambda: (answer := get()).is_success and answer.text, 10, "the metrics")
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(prefix))
    return sum(float(value) for name, _, value in lines if mark in name)
