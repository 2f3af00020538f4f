"""What must hold before a pool starts: its address is free, and the run directory has a current slot plan.

To be called in a gunicorn master or the supervisor. The plan is made in a process of its own, so that no master loads
CUDA or a model library.
"""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.errors import StartError
from shared.plan import PLAN_LOCK_FILE, Plan, read_current_plan, read_plan
from shared.run_directory import prepare_run_directory
from shared.settings import Address, Settings


def check_address_free(address: Address) -> None:
    """Bind the address once. gunicorn itself retries for five seconds, and then logs less.

    Raises:
        StartError: the address cannot be bound.
    """
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise StartError(
                f"The gateway cannot listen on {address} ({error.strerror}): set TERCET_BIND to another host:port."
            ) from error


def read_or_make_plan(settings: Settings, environ: Mapping[str, str]) -> Plan:
    """The plan for these settings: the run directory's if it is current, else one made by `tercet plan --write`.

    A lock makes two masters that start together take turns, so that checkpoints are fetched once.

    Raises:
        StartError: the plan cannot be made; `tercet plan` has printed the reason on stderr.
    """
    run_path = prepare_run_directory(settings)
    with (run_path / PLAN_LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (plan := read_current_plan(settings, environ)) is not None:
            return plan
        command = [sys.executable, "-m", "deploy", "plan", "--write"]
        root = Path(__file__).parent.parent
        if subprocess.run(command, cwd=root, env=dict(environ), stdout=subprocess.DEVNULL, check=False).returncode:
            raise StartError("The slot plan could not be made; the reason is in the lines above.")
        return read_plan(run_path)
