"""Powers the EC2 instance off after an idle stop: `ExecStopPost` of `tercet.service.d/aws.conf`.

systemd says how the service ended (`EXIT_STATUS`). Only an idle stop ends the instance: a stop by an operator, a
restart and a crash do not. If a job is open, the service starts again instead. A job that is stored after this look is
run after the next start, which the function's sweep makes when EC2 reports the instance as stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import structlog

from gateway.jobs.opening import open_store
from shared.errors import JobsUnavailable
from shared.settings import Settings

# Value of `tercet serve --idle-status` in `tercet.service.d/aws.conf`.
IDLE_STATUS = 42
POWER_OFF = ("systemctl", "--no-block", "poweroff")
log = structlog.get_logger()


def has_open_job(environ: Mapping[str, str]) -> bool:
    """False also where the store cannot be reached: a sweep starts the instance again if there is one."""
    store = open_store(Settings.load(environ).job_store)
    try:
        return store.num_open() > 0
    except JobsUnavailable:
        return False
    finally:
        store.close()


def main(environ: Mapping[str, str]) -> int:
    """The exit code of `systemctl`, or 0 if the instance stays on."""
    if environ.get("EXIT_STATUS") != str(IDLE_STATUS):
        return 0
    if has_open_job(environ):
        log.info("power_off_skipped", reason="a job arrived during the idle stop")
        return 0
    log.info("power_off_requested")
    return subprocess.run(POWER_OFF, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(os.environ))
