"""A gateway's use of a job store in a process that tests kill. Arguments: the store's URL, and what to do."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import structlog

sys.path.insert(0, str(Path(__file__).parents[3]))

from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from gateway.jobs.store import Job
from shared.cancellation import Cancelling


def announce_and_hang(moment: str) -> None:
    print(moment, flush=True)
    time.sleep(60)


def hang_around_store(store: Any, moment: str) -> None:
    """Make the store hang before or after it replaces a job by its final state."""
    replace = store.replace

    def replace_and_hang(old: Job, new: Job) -> bool:
        if moment == "compute" and new.state == "succeeded":
            announce_and_hang(moment)
        is_replaced: bool = replace(old, new)
        if moment == "store" and new.state == "succeeded":
            announce_and_hang(moment)
        return is_replaced

    store.replace = replace_and_hang


def main(url: str, moment: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    store = open_store(url)
    queue = JobQueue(store, ttl_s=3600, max_open=100)
    if moment == "lease-all":
        queue.num_open()
        print("ready", flush=True)
        sys.stdin.readline()
        while (leased := queue.lease()) is not None:
            print(leased.id, flush=True)
        return
    hang_around_store(store, moment)
    job, _ = queue.submit("o", b"{}")
    print(job.id, flush=True)
    if moment == "insert":
        announce_and_hang(moment)

    def compute(job: Job, cancelling: Cancelling) -> bytes:
        if moment == "lease":
            announce_and_hang(moment)
        return b'"of the killed process"'

    JobExecutor(queue, num_threads=1).start(compute)
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
