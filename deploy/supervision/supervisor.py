"""`tercet serve`: starts both gunicorn masters, reports when all slots are warm, restarts dead masters, drains on stop.
It stops on a signal, or when no completion was requested for `TERCET_IDLE_STOP_S`.

The supervisor answers no request and holds no model. It holds the listening socket, so that connections wait while a
dead gateway is replaced. If the supervisor dies, the kernel signals the gateway's master (PR_SET_PDEATHSIG), and the
workers' master once the gateway has ended too: both pools of an instance end in order, however they end.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

import structlog
from rich.console import Console
from rich.live import Live

from deploy.supervision.announcements import model_progress, print_models, print_ready
from deploy.supervision.slot_states import slot_reader, slot_table
from deploy.tuning.planning import Downloads, make_plan, remember_served
from shared.errors import StartError
from shared.home import START_DIRECTORY, start_directory
from shared.masters.generations import WORKERS_DIED_EXIT_CODE
from shared.masters.run_directory import (
    device_lock_name,
    lock_holder,
    lock_run_directory,
    prepare_run_directory,
    remove_lock_file,
    remove_run_files,
    restore_lock,
    restore_run_directory,
)
from shared.masters.startup import check_access, check_pool_port, listen
from shared.plan import PLAN_FILE, PLAN_LOCK_FILE, Plan, read_plan, write_plan
from shared.process import PR_SET_PDEATHSIG, forbid_core_files, prctl
from shared.settings import CLIENT, Settings

ROOT = Path(__file__).parents[2]
ROLES = ("workers", "gateway")
POLL_S = 0.1
RESTORE_S = 1.0  # how often the run directory is looked at
REAP_S = 0.02
# How long before the end of the grace the supervisor ceases to wait for a pool. The gateway's requests are cancelled by
# then, so that workers may end; the kernel needs part of a second to free the memory of a model.
STOP_MARGIN_S = {"gateway": 0.7, "workers": 0.4}
KILL_S = 5.0  # after SIGKILL, until a process group is gone; the kernel frees the memory of a model first
# Restart budget: when more masters than this die within a minute, the instance ends.
MAX_RESTARTS_PER_MINUTE = 3
# Time that the workers of a dead workers' master have to stop: two generations of models may not fit into memory.
ORPHAN_GRACE_S = 3.0
# Time in which an orphaned gateway closes its listening socket.
ORPHAN_LISTENER_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
log = structlog.get_logger()


class Supervisor:
    """One running instance. `run` returns the exit code."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        console: Console,
        roles: tuple[str, ...] = ROLES,
        *,
        idle_status: int = 0,
        downloads: Downloads = "named",
    ) -> None:
        """
        Args:
            roles: the pools to start, in the order of `ROLES`; one of them where the other is on another machine.
            idle_status: the exit code of an idle stop.
            downloads: when SmolLM2 may be downloaded.
        """
        self._downloads: Downloads = downloads
        self._roles = roles
        self._settings = settings = settings.located()
        self._idle_status = idle_status
        self._exit_code = 0
        # The pools run in the installation's directory: gunicorn imports from its own, and the user's may be removed.
        self._environ = {**environ, "TERCET_RUN_DIR": str(settings.run_path), START_DIRECTORY: start_directory()}
        self._console = console
        self._run_path = settings.run_path
        self._next_restore_at = 0.0  # monotonic
        self._can_restore = True
        self._failed_slots: dict[int, str] = {}  # reasons at the start, by index
        self._own_files: list[str] = []  # names in the run directory that this instance removes at its end
        self._listener: socket.socket | None = None  # the gateway's
        self._masters: dict[str, subprocess.Popen[bytes]] = {}
        # Process groups of dead masters whose workers finish requests, with the time at which they are killed.
        self._orphans: list[tuple[subprocess.Popen[bytes], float]] = []
        self._restart_times_s: list[float] = []  # monotonic, of the last minute
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reload_waits = False  # SIGHUP came during the start

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, or until the server is idle.

        Raises:
            StartError: the instance cannot start with these settings, or a master keeps dying. No process is left.
        """
        signal.signal(signal.SIGHUP, self._record)  # its default action would end a start
        for name in (signal.SIGTERM, signal.SIGINT):  # a start's download removes its files before this process ends
            signal.signal(name, lambda *_: sys.exit())
        forbid_core_files()
        _check_roles(self._settings, self._roles)
        if "gateway" in self._roles:
            check_access(self._settings)
        # An instance removes it at its end.
        was_killed = (prepare_run_directory(self._settings) / "serve.lock").exists()
        # Orphans become children of this process: it reaps them, and sees when a process group has ended.
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with ExitStack() as stack:
            self._lock = lock_run_directory(self._settings, "serve")
            stack.callback(self._unlock)
            self._wait_for_orphans()
            # A pool may run here without a supervisor: refuse before overwriting or removing its files.
            for role in ROLES:
                remove_lock_file(self._settings, role)
            try:
                if "gateway" in self._roles:
                    self._listener = self._listen(ORPHAN_LISTENER_S if was_killed else 0.0)
                self._serve()
            finally:
                for role in ROLES:
                    with suppress(StartError):
                        remove_lock_file(self._settings, role)
                remove_run_files(self._run_path, [*self._own_files, "serve.lock"])
        return self._exit_code

    def _record(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: `_next_signal` returns it."""
        self._signals.put(number)

    def _unlock(self) -> None:
        self._lock.close()

    def _wait_for_orphans(self) -> None:
        """Wait until the pools of an instance whose supervisor was killed have ended.

        Raises:
            StartError: they have not ended within the grace period.
        """
        deadline = time.monotonic() + self._settings.server.grace_s + 1.0
        for role in ROLES:
            if (holder := lock_holder(self._settings, role)) is None or not holder.is_supervised:
                continue
            self._console.print(
                f"Waiting for process {holder.pid} ({role}) of an instance that was killed: it may take "
                f"{self._settings.server.grace_s:g} s to finish its requests.",
                highlight=False,
                soft_wrap=True,
            )
            while lock_holder(self._settings, role) is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def _listen(self, patience_s: float) -> socket.socket:
        """The listening socket.

        Args:
            patience_s: how long an orphan may still hold the address.
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return listen(self._settings.server.bind, self._environ)
            except StartError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_S)

    def _serve(self) -> None:
        # The workers' master gets the read end. The other end is held here and, by inheritance, in the gateway's pool.
        self._lifeline_end, self._lifeline = os.pipe()
        # The gateway's workers write to it while completions are requested.
        self._activity_end, self._activity = os.pipe()
        os.set_blocking(self._activity_end, False)
        os.set_blocking(self._activity, False)
        self._plan = plan = self._prepare()
        if not plan.slots:  # TERCET_POOL without TERCET_MODELS
            self._roles = ("gateway",)
        if "workers" in self._roles:
            check_pool_port(self._settings, len(plan.slots))
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._record)
        for role in self._roles:
            self._start(role, is_first=True)
        try:
            if self._wait_until_warm(plan):
                print_ready(self._console, self._settings, plan, self._roles, self._failed_slots)
                self._watch()
        finally:
            self._stop()

    def _prepare(self) -> Plan:
        with model_progress(self._console) as show:
            plan = make_plan(self._settings, self._environ, show, self._downloads)
        print_models(self._console, plan)
        write_plan(plan, self._run_path)
        remember_served(plan, self._settings)
        self._own_files += [PLAN_FILE, PLAN_LOCK_FILE, *(Path(slot.socket).name for slot in plan.slots)]
        self._own_files += {device_lock_name(slot.device) for slot in plan.slots if slot.device != "cpu"}
        return plan

    def _start(self, role: str, *, is_first: bool = False) -> None:
        supervisor = os.getpid()

        def prepare_master() -> None:
            # SIGHUP would end it before it handles signals. It is inherited, and admitted in `when_ready`.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            if role == "workers":  # they end after the gateway, by the pipe
                return
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != supervisor:  # it died before the call
                os._exit(1)

        # A client's key is not needed by servers; the listening socket is passed in another way.
        environ = {
            name: value
            for name, value in self._environ.items()
            if name not in CLIENT and not name.startswith("LISTEN_")
        }
        if is_first:
            environ |= {"TERCET_IS_FIRST_START": "1"}
        if role == "gateway":
            assert self._listener is not None
            listener = self._listener.fileno()
            environ |= {"TERCET_LISTEN_FD": str(listener), "TERCET_LIFELINE_FD": str(self._lifeline)}
            descriptors = [listener, self._lifeline]
            if self._settings.server.idle_stop_s:
                environ |= {"TERCET_ACTIVITY_FD": str(self._activity)}
                descriptors.append(self._activity)
        else:
            environ |= {"TERCET_LIFELINE_FD": str(self._lifeline_end)}
            descriptors = [self._lifeline_end]
        self._masters[role] = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "--config", str(ROOT / "gunicorn.conf.py")],
            cwd=ROOT,
            env={**environ, "TERCET_ROLE": role},
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            # A process group of its own: Ctrl-C reaches only the supervisor, which stops the pools in order.
            process_group=0,
            preexec_fn=prepare_master,  # noqa: PLW1509 - no thread runs that could hold a lock
        )

    def _wait_until_warm(self, plan: Plan) -> bool:
        """Show the slots' progress until each is warm or has failed. Returns False if a signal stopped the start.

        A slot that failed tries again while the others serve.

        Raises:
            StartError: a master exited, or no slot of a model could load it.
        """
        reasons: dict[int, str] = {}  # reasons of the slots that have failed, by index
        with (
            slot_reader(self._settings, self._environ, plan, self._roles) as read_states,
            Live(console=self._console, refresh_per_second=8, transient=True) as live,
        ):
            while True:
                if (number := self._next_signal()) in {signal.SIGTERM, signal.SIGINT}:
                    return False
                self._reload_waits |= number == signal.SIGHUP
                for role, master in self._masters.items():
                    if master.poll() is None:
                        continue
                    if master.returncode == WORKERS_DIED_EXIT_CODE:
                        raise StartError(
                            "Workers of every slot ended again and again before they had loaded their models; the log "
                            "above says how. Those that were killed (SIGKILL) probably lacked memory: serve fewer or "
                            "smaller models, or lower TERCET_MAX_BATCH."
                        )
                    raise StartError(
                        f"The {role} master exited ({_exit_reason(master)}); the log above has the reason."
                    )
                if (states := read_states()) is None:
                    continue
                for index, state in states.items():
                    if state.state == "failed":
                        reasons[index] = state.reason or "its worker's log has the reason"
                    elif state.state == "warm":
                        reasons.pop(index, None)
                for name in {slot.model for slot in plan.slots}:
                    own = [slot for slot in plan.slots if slot.model == name]
                    if all(slot.index in reasons for slot in own):
                        raise StartError(f"{name} could not be loaded on {own[0].device}: {reasons[own[0].index]}")
                live.update(slot_table(states))
                num_warm = sum(state.state == "warm" for state in states.values())
                if num_warm + len(reasons) == len(plan.slots):
                    self._failed_slots = reasons
                    return True

    def _next_signal(self) -> int | None:
        try:
            return self._signals.get(timeout=POLL_S)
        except queue.Empty:
            return None

    def _watch(self) -> None:
        """Restart dead masters until SIGTERM, SIGINT or the idle stop; SIGHUP reloads both pools.

        Raises:
            StartError: the restart budget is spent.
        """
        active_at = time.monotonic()
        while True:
            number = self._next_signal()
            if self._was_active():
                active_at = time.monotonic()
            elif 0 < self._settings.server.idle_stop_s <= time.monotonic() - active_at:
                log.info("idle_stop_began", idle_s=self._settings.server.idle_stop_s)
                self._exit_code = self._idle_status
                return
            if number in {signal.SIGTERM, signal.SIGINT}:
                return
            if number == signal.SIGHUP or self._reload_waits:
                self._reload_waits = False
                for master in self._masters.values():
                    master.send_signal(signal.SIGHUP)
            self._reap()
            if time.monotonic() >= self._next_restore_at:
                self._restore_files()
            for role, master in self._masters.items():
                if master.poll() is not None:
                    self._restart(role, master)
            self._end_orphans(time.monotonic())

    def _restore_files(self) -> None:
        """Make again what was removed from the run directory. The pools do so with their locks and sockets."""
        self._next_restore_at = time.monotonic() + RESTORE_S
        try:
            restore_run_directory(self._run_path)
            self._lock = restore_lock(self._settings, "serve", self._lock)
            try:
                self._plan = read_plan(self._run_path)
            except StartError:
                write_plan(self._plan, self._run_path)
        except StartError as error:
            if self._can_restore:
                log.error("run_directory_lost", reason=str(error))
            self._can_restore = False
        else:
            self._can_restore = True

    def _was_active(self) -> bool:
        """Whether the gateway has reported activity since the last call."""
        with suppress(BlockingIOError):
            return bool(os.read(self._activity_end, 65536))  # as much as a pipe holds
        return False

    def _restart(self, role: str, master: subprocess.Popen[bytes]) -> None:
        log.error("master_died", master=role, why=_exit_reason(master))
        now = time.monotonic()
        self._restart_times_s = [then for then in self._restart_times_s if now - then < 60] + [now]
        if len(self._restart_times_s) > MAX_RESTARTS_PER_MINUTE:
            raise StartError(f"The {role} master keeps dying ({_exit_reason(master)}); the log above has the reason.")
        if role == "gateway":
            # Its worker finishes what it has accepted; what it has not accepted waits for the new master's.
            _signal_group(master, signal.SIGTERM)
            self._orphans.append((master, now + self._settings.server.grace_s))
        else:
            self._end_group(master, signal.SIGTERM, now + ORPHAN_GRACE_S)
        self._start(role)

    def _stop(self) -> None:
        """Stop the gateway, which first turns readiness off, then the workers; kill what is left after the grace."""
        grace_s = self._settings.server.grace_s
        deadline = time.monotonic() + grace_s
        if self._listener is not None:
            self._listener.close()  # else connections would wait in it after the gateway has closed its copy
        for role in reversed(ROLES):
            if (master := self._masters.get(role)) is None:
                continue
            with suppress(ProcessLookupError):
                master.send_signal(signal.SIGTERM)
            # At the end of the grace the gateway has cancelled what was left, so that the workers need not wait for it.
            end = deadline - min(STOP_MARGIN_S[role], grace_s / 10)
            while (master.poll() is None or (role == "gateway" and self._orphans)) and time.monotonic() < end:
                if self._next_signal() in {signal.SIGTERM, signal.SIGINT}:
                    end = deadline = 0.0  # a second signal ends the grace period
                self._reap()
                self._end_orphans(time.monotonic())
        self._end_orphans(float("inf"))
        for role, master in self._masters.items():  # the workers first: the gateway may still be sending answers
            while role == "gateway" and master.poll() is None and time.monotonic() < deadline:
                time.sleep(REAP_S)
            _signal_group(master, signal.SIGKILL)
        for master in self._masters.values():
            self._end_group(master, signal.SIGKILL, time.monotonic() + KILL_S)
            master.wait()

    def _end_orphans(self, now: float) -> None:
        """Forget the groups of dead masters that have ended, and kill those whose time is over."""
        for orphan, deadline in list(self._orphans):
            if now >= deadline:
                self._end_group(orphan, signal.SIGKILL, time.monotonic() + KILL_S)
            if now >= deadline or not _signal_group(orphan, 0):
                self._orphans.remove((orphan, deadline))

    def _end_group(self, master: subprocess.Popen[bytes], number: signal.Signals, deadline: float) -> None:
        """Signal a master's process group, wait until it is gone, and kill what is left at the deadline."""
        is_alive = _signal_group(master, number)
        while is_alive and time.monotonic() < deadline:
            time.sleep(REAP_S)
            self._reap()
            is_alive = _signal_group(master, 0)
        if is_alive:
            _signal_group(master, signal.SIGKILL)

    def _reap(self) -> None:
        """Take the exit status of each child that has ended: masters, and workers whose master is dead."""
        masters = {master.pid: master for master in self._masters.values()}
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: orphans are init's, and `poll` reaps the masters
            return
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if (master := masters.get(ended.si_pid)) is not None:
                    master.poll()
                else:
                    os.waitpid(ended.si_pid, 0)


def _signal_group(master: subprocess.Popen[bytes], number: int) -> bool:
    """Signal a master's process group; 0 signals nothing. Returns whether it has processes."""
    try:
        os.killpg(master.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _exit_reason(master: subprocess.Popen[bytes]) -> str:
    code = master.returncode
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _check_roles(settings: Settings, roles: tuple[str, ...]) -> None:
    """
    Raises:
        StartError: a pool would run without the other, and without a way to it.
    """
    if roles == ("workers",):
        if settings.remote.pool_bind is None:
            raise StartError("Workers without a gateway listen on TCP: set TERCET_POOL_BIND=host:port.")
        if settings.remote.pool:
            raise StartError("TERCET_POOL is a setting of gateways: unset it where only workers run.")
        if settings.server.idle_stop_s:
            raise StartError("TERCET_IDLE_STOP_S needs the gateway, which sees requests: unset it.")
    if roles == ("gateway",):
        if not settings.remote.pool:
            raise StartError("A gateway without workers of its own needs TERCET_POOL, like small=https://gpu-a:8100.")
        if settings.model.models:
            raise StartError("TERCET_MODELS names models for workers of this machine: unset it, or omit --role.")
    if roles == ROLES and settings.remote.pool and not settings.model.models:
        raise StartError(
            "TERCET_POOL without TERCET_MODELS leaves this machine without workers: start `tercet serve --role "
            "gateway`, or set TERCET_MODELS to have workers here too."
        )
