"""`tercet serve`: starts both gunicorn masters, reports when all slots are warm, restarts dead masters, drains on stop.

The supervisor answers no request and holds no model. If it dies, the kernel signals its masters (PR_SET_PDEATHSIG), and
workers whose master is gone stop by themselves.
"""

from __future__ import annotations

import ctypes
import os
import queue
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import structlog
from rich.console import Console
from rich.live import Live
from rich.table import Table

from deploy.local_client import local_client
from deploy.planning import make_plan
from shared.errors import StartError
from shared.plan import DRAINING_FILE, PLAN_FILE, PLAN_LOCK_FILE, Plan, write_plan
from shared.run_directory import lock_run_directory, remove_lock_file, remove_run_files
from shared.settings import CLIENT, Settings
from shared.startup import check_access, check_address_free

ROOT = Path(__file__).parent.parent
ROLES = ("workers", "gateway")
POLL_S = 0.1
# Restart budget: when more masters than this die within a minute, the instance ends.
MAX_RESTARTS_PER_MINUTE = 3
# Time that the workers of a dead master have to stop by themselves. They hold its sockets, so they are killed then.
ORPHAN_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None, use_errno=True)
log = structlog.get_logger()


class Supervisor:
    """One running instance. `run` returns the exit code."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], console: Console) -> None:
        self._settings = settings
        self._environ = environ
        self._console = console
        self._run_path = settings.run_path
        self._own_files: list[str] = []  # names in the run directory that this instance removes at its end
        self._masters: dict[str, subprocess.Popen[bytes]] = {}
        self._restart_times_s: list[float] = []  # monotonic, of the last minute
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Raises:
            StartError: the instance cannot start with these settings, or a master keeps dying. No process is left.
        """
        with lock_run_directory(self._settings, "serve"):
            # A pool may run here without a supervisor: refuse before overwriting or removing its files.
            for role in ROLES:
                remove_lock_file(self._settings, role)
            try:
                self._serve()
            finally:
                for role in ROLES:
                    with suppress(StartError):
                        remove_lock_file(self._settings, role)
                remove_run_files(self._run_path, [*self._own_files, "serve.lock"])
        return 0

    def _serve(self) -> None:
        plan = self._prepare()
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, lambda number, _frame: self._signals.put(number))
        for role in ROLES:
            self._start(role)
        try:
            if self._wait_until_warm(plan):
                self._announce(plan)
                self._watch()
        finally:
            self._stop()

    def _prepare(self) -> Plan:
        check_access(self._settings)
        check_address_free(self._settings.bind)
        with self._console.status("Looking for models …") as status:

            def show(name: str, share: float) -> None:
                status.update(f"Fetching {name} … {share:.0%}")

            plan = make_plan(self._settings, self._environ, show)
        for model in plan.models:
            if model.warning:
                self._console.print(f"[yellow]Note:[/] {model.warning}")
        (self._run_path / DRAINING_FILE).unlink(missing_ok=True)  # left by an instance that was killed
        write_plan(plan, self._run_path)
        self._own_files += [PLAN_FILE, PLAN_LOCK_FILE, *(Path(slot.socket).name for slot in plan.slots)]
        return plan

    def _start(self, role: str) -> None:
        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self._masters[role] = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--config", str(ROOT / "gunicorn.conf.py")],
            cwd=ROOT,
            # The key of a client is not the servers' business.
            env={name: value for name, value in self._environ.items() if name not in CLIENT} | {"TERCET_ROLE": role},
            stdin=subprocess.DEVNULL,
            # A process group of its own: Ctrl-C reaches only the supervisor, which stops the pools in order.
            process_group=0,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread is running that could hold a lock
        )

    def _wait_until_warm(self, plan: Plan) -> bool:
        """Show the slots' progress until all are warm. Returns False if a signal stopped the start.

        Raises:
            StartError: a master exited, or a slot's first load failed.
        """
        with (
            local_client(self._settings, self._environ, timeout_s=1.0) as client,
            Live(console=self._console, refresh_per_second=8, transient=True) as live,
        ):
            while True:
                if self._next_signal() in {signal.SIGTERM, signal.SIGINT}:
                    return False
                for role, master in self._masters.items():
                    if master.poll() is not None:
                        raise StartError(
                            f"The {role} master exited ({_exit_reason(master)}); the log above has the reason."
                        )
                try:
                    slots = client.get("/health/ready").json()["slots"]
                except (httpx.TransportError, ValueError, KeyError):
                    continue
                for slot in slots:
                    if slot["state"] == "failed":
                        raise StartError(f"{slot['model']} could not be loaded on {slot['device']}: {slot['reason']}")
                live.update(_slot_table(slots))
                if all(slot["state"] == "warm" for slot in slots) and len(slots) == len(plan.slots):
                    return True

    def _next_signal(self) -> int | None:
        try:
            return self._signals.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _announce(self, plan: Plan) -> None:
        url = self._settings.url
        cert = f"--cacert {shlex.quote(str(self._settings.tls_cert))} " if self._settings.uses_tls else ""
        key = '-H "Authorization: Bearer $TERCET_API_KEY" ' if self._settings.keys else ""
        models = ", ".join(
            f"{model.name} × {sum(slot.model == model.name for slot in plan.slots)}" for model in plan.models
        )
        self._console.print(f"[green]Every slot is warm[/] ({models}). Serving at [bold]{url}[/]; Ctrl-C stops. Try:\n")
        self._console.print(
            f"""  curl {cert}{key}-d '{{"context": "The old man looked at the sea and"}}' {url}/autocomplete\n""",
            highlight=False, soft_wrap=True,
        )  # fmt: skip

    def _watch(self) -> None:
        """Restart dead masters until SIGTERM or SIGINT; SIGHUP reloads both pools.

        Raises:
            StartError: the restart budget is spent.
        """
        while True:
            number = self._next_signal()
            if number in {signal.SIGTERM, signal.SIGINT}:
                return
            if number == signal.SIGHUP:
                for master in self._masters.values():
                    master.send_signal(signal.SIGHUP)
            for role, master in self._masters.items():
                if master.poll() is not None:
                    self._restart(role, master)

    def _restart(self, role: str, master: subprocess.Popen[bytes]) -> None:
        log.error("master_died", master=role, why=_exit_reason(master))
        now = time.monotonic()
        self._restart_times_s = [then for then in self._restart_times_s if now - then < 60] + [now]
        if len(self._restart_times_s) > MAX_RESTARTS_PER_MINUTE:
            raise StartError(f"The {role} master keeps dying ({_exit_reason(master)}); the log above has the reason.")
        _end_group(master, signal.SIGTERM, time.monotonic() + ORPHAN_GRACE_S)
        self._start(role)

    def _stop(self) -> None:
        """Drain: turn readiness off, stop the gateway, then the workers; kill what is left after the grace period."""
        deadline = time.monotonic() + self._settings.grace_s
        if all(master.poll() is None for master in self._masters.values()):
            self._own_files.append(DRAINING_FILE)
            (self._run_path / DRAINING_FILE).touch()
            self._sleep_unless_signalled(self._settings.drain_s)
        for role in reversed(ROLES):
            master = self._masters.get(role)
            if master is None:
                continue
            with suppress(ProcessLookupError):
                master.send_signal(signal.SIGTERM)
            while master.poll() is None and time.monotonic() < deadline:
                if self._next_signal() in {signal.SIGTERM, signal.SIGINT}:
                    deadline = 0.0  # a second signal ends the grace period
            _end_group(master, signal.SIGKILL, time.monotonic() + 1.0)
            master.wait()

    def _sleep_unless_signalled(self, duration_s: float) -> None:
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            if self._next_signal() is not None:
                return


def _end_group(master: subprocess.Popen[bytes], number: signal.Signals, deadline: float) -> None:
    """Signal a master's process group, wait until it is gone, and kill what is left at the deadline."""
    try:
        os.killpg(master.pid, number)
        while time.monotonic() < deadline:
            master.poll()
            os.killpg(master.pid, 0)
            time.sleep(0.02)
        os.killpg(master.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _exit_reason(master: subprocess.Popen[bytes]) -> str:
    code = master.returncode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _slot_table(slots: list[dict[str, object]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("slot", "model", "device", "state", ""):
        table.add_column(heading)
    for slot in slots:
        progress = f"{slot['progress']:.0%}" if slot["state"] == "loading" else ""
        table.add_row(str(slot["slot"]), str(slot["model"]), str(slot["device"]), str(slot["state"]), progress)
    return table
