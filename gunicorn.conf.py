"""The one gunicorn configuration: `TERCET_ROLE=gateway` or `TERCET_ROLE=workers` decides which pool this is.

gunicorn runs this file in its master (and again on HUP), so it imports nothing but `shared`: a master that
touched CUDA or torch would hand a broken copy to every worker it forks. Hooks lease slots to workers.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # `gunicorn` as a script does not look beside this file

from shared.errors import StartError
from shared.leases import Leases
from shared.run_directory import lock_run_directory
from shared.settings import Settings
from shared.startup import check_address_free, read_or_make_plan
from shared.telemetry import logging_config
from shared.worker_environment import worker_environment

# Connections that need a thread but are no branch: state streams of two gateways (there are two during a
# reload), metrics, refusals past the bound.
WORKER_RESERVE_THREADS = 8
# Health, metrics and refusals must be answered while every other thread waits.
GATEWAY_RESERVE_THREADS = 16

role = os.environ.get("TERCET_ROLE", "")
if role not in {"gateway", "workers"}:
    sys.exit("Set TERCET_ROLE=gateway or TERCET_ROLE=workers; `tercet serve` starts both.")
try:
    settings = Settings.load(os.environ)
    plan = read_or_make_plan(settings, os.environ)
except StartError as error:
    sys.exit(str(error))

proc_name = f"tercet {role}"
logconfig_dict = logging_config(role, settings.log)
loglevel = settings.log
control_socket_disable = True  # since 25.1 it lies in a place that all users share
worker_tmp_dir = "/dev/shm" if os.path.isdir("/dev/shm") else None
# Catches only stopped processes: with threads the main thread beats on while a request hangs. Nothing slow
# runs before the loop, so it can be short.
timeout = 10
graceful_timeout = int(settings.grace_s)
keepalive = 75  # longer than the gateway's client keeps a connection, so that the client closes first

if role == "workers":
    bind = [f"unix:{slot.socket}" for slot in plan.slots]
    workers = len(plan.slots)
    umask = 0o177  # sockets 0600; gunicorn's default would let every user of the machine in
    worker_class = "workers.gunicorn_worker.SlotWorker"
    wsgi_app = "workers.app:build()"
    threads = settings.max_batch + WORKER_RESERVE_THREADS
else:
    bind = [str(settings.bind)]
    workers = 1
    worker_class = "gthread"
    wsgi_app = "gateway.app:build()"
    # A waiting request holds a thread, and so does a refusal: running + queue bound + a reserve.
    threads = plan.max_running + settings.queue + GATEWAY_RESERVE_THREADS
worker_connections = 2 * threads + 1000


def on_starting(server: Any) -> None:
    """Refuse, in one sentence, what gunicorn would retry or take from somebody else."""
    try:
        server.run_directory_lock = lock_run_directory(settings, role)
        if role == "gateway":
            check_address_free(settings.bind)
    except StartError as error:
        sys.exit(str(error))
    if role == "workers":
        server.leases = Leases(len(plan.slots))


def nworkers_changed(server: Any, new_value: int, old_value: int | None) -> None:
    """TTIN and TTOU would run workers without a slot, or leave a slot without a worker."""
    if old_value is not None and new_value != workers:
        server.log.warning("The plan has %d workers; TTIN and TTOU are refused.", workers)
        server.num_workers = workers


def pre_fork(server: Any, worker: Any) -> None:
    """In the master: lease a slot. A worker's age only grows, so it cannot name a slot after a crash."""
    if role == "workers":
        worker.leases = server.leases
        worker.slot = plan.slots[server.leases.lease(worker.age)]


def child_exit(server: Any, worker: Any) -> None:
    """In the master: take the slot back."""
    if role == "workers":
        server.leases.free(worker.age)


def post_fork(server: Any, worker: Any) -> None:
    """In the worker, before the app and torch are imported: its environment and its socket."""
    # Our own line a request says more; gunicorn's is put together for each, and thrown away.
    worker.log.access = lambda *_: None
    # The lock is the master's: an orphan that still finishes its work must not keep a new master out.
    server.run_directory_lock.close()
    if role == "workers":
        os.environ.update(worker_environment(worker.slot, plan, settings, os.environ))
        # Keep only the slot's own listener: another's, held open here, would accept connections that nobody
        # answers once its master is gone.
        for index, listener in enumerate(worker.sockets):
            if index != worker.slot.index:
                listener.close()
        worker.sockets = [worker.sockets[worker.slot.index]]
