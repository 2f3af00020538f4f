"""The gunicorn configuration of both pools: `TERCET_ROLE=gateway` or `TERCET_ROLE=workers` selects the pool.

gunicorn runs this file in its master, and again on SIGHUP. It imports only `shared`: neither CUDA nor torch's threads
survive a fork, so a master must load neither. Hooks lease slots to workers; the gateway is a pool of one slot.
"""

import math
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

if (root := str(Path(__file__).parent)) not in sys.path:  # the `gunicorn` script does not add it
    sys.path.insert(0, root)

from shared.errors import StartError
from shared.home import START_DIRECTORY, start_directory
from shared.masters.generations import START_FAILED_EXIT_CODE, WORKERS_DIED_EXIT_CODE, Generations
from shared.masters.run_directory import file_identity, lock_run_directory, restore_lock, restore_run_directory
from shared.masters.startup import (
    BACKLOG,
    check_access,
    check_address_free,
    check_exposure,
    check_pool_port,
    gateway_tls,
    is_activated,
    read_or_make_plan,
    stop_with_holders,
)
from shared.masters.worker_life import WorkerLife
from shared.plan import PLAN_FILE, write_plan
from shared.process import forbid_core_dumps, forbid_core_files, map_large_blocks, raise_descriptor_limit
from shared.setting_values import Address
from shared.settings import Settings
from shared.telemetry import configure_structlog, logging_config, start_log_thread, use_log_streams
from shared.worker_environment import worker_environment

# Threads for connections other than branches: the state streams of two gateways (during a reload there are two),
# metrics, and refusals.
WORKER_RESERVE_THREADS = 8
# Gateways that may use a worker over TCP. Each has a state stream, and two during its reload.
MAX_GATEWAYS = 16
# Threads that connections without a key may hold on a TCP port (ENTRY_THREADS in workers/tcp_port.py).
ENTRY_THREADS = 4
# Threads for health, metrics and refusals while all others wait for a branch.
GATEWAY_RESERVE_THREADS = 16

use_log_streams()
role = os.environ.get("TERCET_ROLE", "")
if role not in {"gateway", "workers"}:
    sys.exit("Set TERCET_ROLE=gateway or TERCET_ROLE=workers; `tercet serve` starts both.")
try:
    settings = Settings.load(os.environ).located()
    os.environ |= {"TERCET_RUN_DIR": str(settings.run_path), START_DIRECTORY: start_directory()}  # for the workers
    # Files that are wrong refuse a reload. Workers inherit the TLS settings, so one that is replaced reads no TLS file.
    if role == "gateway":
        check_access(settings)
    tls = gateway_tls(settings) if role == "gateway" else None
    plan = read_or_make_plan(settings, os.environ)
except StartError as error:
    sys.exit(str(error))

listen_fd = os.environ.get("TERCET_LISTEN_FD", "")
# The read end of a pipe for the workers; the supervisor, the gateway's master and its workers hold the write end.
lifeline_fd = os.environ.get("TERCET_LIFELINE_FD", "")
# The write end of a pipe by which the gateway reports that it is used; the supervisor reads it if it stops when idle.
activity_fd = os.environ.get("TERCET_ACTIVITY_FD", "")
raise_descriptor_limit()
forbid_core_files()
configure_structlog(role, settings.server.log)
proc_name = f"tercet {role}"
logconfig_dict = logging_config(role, settings.server.log)
loglevel = settings.server.log
control_socket_disable = True  # since 25.1 gunicorn opens it in a directory that all users share
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None
# Replaces only stopped processes: with threads, the main thread keeps the heartbeat while a request hangs. No slow work
# runs before the main loop, so the timeout can be short.
timeout = 10
graceful_timeout = math.ceil(settings.server.grace_s)  # the supervisor keeps the exact time
# Of workers: above the keepalive_expiry of the gateway's client, so that the client closes first.
keepalive = 75
# A peer is never trusted as a proxy: a header could otherwise set the path (SCRIPT_NAME, PATH_INFO) or the scheme.
forwarded_allow_ips = ""
forwarder_headers = ""
secure_scheme_headers: dict[str, str] = {}

if role == "workers" and not plan.slots:
    sys.exit("TERCET_POOL without TERCET_MODELS leaves this machine without workers: start the gateway only.")
if role == "workers":
    bind = [f"unix:{slot.socket}" for slot in plan.slots]
    workers = len(plan.slots)
    umask = 0o177  # sockets get mode 0600; gunicorn's default lets every user of the machine connect
    worker_class = "workers.gunicorn_worker.SlotWorker"
    wsgi_app = "workers.app:build()"
    threads = settings.pool.max_batch + WORKER_RESERVE_THREADS
    if (pool_bind := settings.remote.pool_bind) is not None:  # beside its Unix socket, each worker listens at a port
        bind += [str(Address(pool_bind.host, pool_bind.port + slot.index)) for slot in plan.slots]
        threads += 2 * MAX_GATEWAYS + ENTRY_THREADS
else:
    # The supervisor passes its listening socket, so that connections wait in it while a master is replaced.
    bind = [f"fd://{listen_fd}" if listen_fd else str(settings.server.bind)]
    backlog = BACKLOG
    workers = 1
    worker_class = "gateway.server.gunicorn_worker.GatewayServer"
    wsgi_app = "gateway.app:build()"
    # A request that waits holds a thread, and so does a refusal.
    threads = plan.max_running + settings.limits.queue + GATEWAY_RESERVE_THREADS
worker_connections = 2 * threads + 1000


def on_starting(server: Any) -> None:
    """Refuse a start that gunicorn would retry, or that would take the sockets of another instance."""
    try:
        server.run_directory_lock = lock_run_directory(settings, role, is_supervised=bool(lifeline_fd))
        if role == "workers":
            # The supervisor has checked the ports; the workers of a master that died may hold them a little longer.
            server.pool_access = check_pool_port(settings, len(plan.slots), checks_ports=not lifeline_fd)
        if role == "gateway" and not listen_fd and not is_activated(os.environ):
            check_address_free(settings.server.bind)
    except StartError as error:
        sys.exit(str(error))
    server.generations = Generations(server, workers, plan.max_successors if role == "workers" else ())
    if role == "workers" and lifeline_fd:
        stop_with_holders(int(lifeline_fd))


def when_ready(server: Any) -> None:
    """Before the first worker starts: admit SIGHUP, and check the addresses that are really bound."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # the supervisor has blocked it
    if role != "gateway":
        server.socket_files = [file_identity(Path(slot.socket)) for slot in plan.slots]
        return
    try:
        for listener in server.LISTENERS:
            if listener.sock.family in {socket.AF_INET, socket.AF_INET6}:
                check_exposure(settings, Address(*listener.sock.getsockname()[:2]))
    except StartError as error:
        sys.exit(str(error))


def nworkers_changed(server: Any, new_value: int, old_value: int | None) -> None:
    """Undo TTIN and TTOU: they would fork a worker without a slot, or leave a slot without a worker."""
    if old_value is not None and new_value != workers:
        server.log.warning("The plan has %d workers; TTIN and TTOU are refused.", workers)
        server.num_workers = workers


def pre_fork(server: Any, worker: Any) -> None:
    """Lease a slot, in the master. A worker's age only grows, so `age % n` is not a slot after a crash."""
    _restore_files(server)
    worker.life = WorkerLife()
    worker.leases = server.generations.leases
    worker.slot_index = server.generations.lease(worker.age)
    if role == "workers":
        worker.slot = plan.slots[worker.slot_index]
        worker.pool_access = server.pool_access
        worker.socket_file = server.socket_files[worker.slot_index]
    else:
        worker.settings = settings
        worker.tls = tls
        worker.activity_fd = int(activity_fd) if activity_fd else None


def _restore_files(server: Any) -> None:
    """Make again what a worker needs of the run directory, if it was removed."""
    try:
        restore_run_directory(settings.run_path)
        server.run_directory_lock = restore_lock(
            settings, role, server.run_directory_lock, is_supervised=bool(lifeline_fd)
        )
        if not (settings.run_path / PLAN_FILE).exists():
            write_plan(plan, settings.run_path)
    except StartError as error:
        server.log.error("%s", error)


def child_exit(server: Any, worker: Any) -> None:
    """Free the slot, in the master."""
    server.generations.free(worker.slot_index, worker.age)
    leases = server.generations.leases
    is_first_start = role == "workers" and os.environ.get("TERCET_IS_FIRST_START", "") != ""
    if is_first_start and leases.have_all_failed and not leases.is_stopping:
        server.halt("No worker lived long enough to load its model.", WORKERS_DIED_EXIT_CODE)


def post_fork(server: Any, worker: Any) -> None:
    """Set the worker's environment and keep only its sockets, before the app and torch are imported."""
    if server.WORKERS:
        # The codes with which gunicorn ends a worker that cannot start halt the pool. While others serve, they go on.
        server.WORKER_BOOT_ERROR = server.APP_LOAD_ERROR = START_FAILED_EXIT_CODE
    forbid_core_dumps()
    start_log_thread()
    if os.access(os.environ[START_DIRECTORY], os.X_OK):  # for paths of libraries, like SSL_CERT_FILE
        os.chdir(os.environ[START_DIRECTORY])
    worker.life.begin()
    # The level CRITICAL only discards the access log's lines; this spares formatting them.
    worker.log.access = lambda *_: None
    # Only the master holds the lock: an orphaned worker that still drains must not lock out a new master.
    server.run_directory_lock.close()
    if role == "workers":
        os.environ.update(worker_environment(worker.slot, plan, settings, os.environ))
        # Another slot's listener, kept open here, would accept connections after its master is gone, and no worker
        # would serve them.
        own = worker.sockets[worker.slot.index :: workers]
        for listener in worker.sockets:
            if listener not in own:
                listener.close()
        worker.sockets = own
    else:
        map_large_blocks()  # not in a worker: torch takes and frees large blocks at each step
