"""R34, R35: a log that is not read, and threads and descriptors that run out."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress

from tests.chaos.load import Load, count_failures
from tests.chaos.measure import Context, Findings
from tests.e2e.harness import serving, until
from tests.e2e.test_engine_failures import as_unprivileged, limited, statuses
from tests.e2e.test_log import PIPE_BYTES, logging_to

NUM_CLIENTS = 2


def serve_with_a_log_that_is_not_read(context: Context, findings: Findings) -> None:
    """R34. Standard output and error are a pipe that is full before the start, and stays so through a reload."""
    reader, writer = os.pipe()
    os.write(writer, b"\n" * PIPE_BYTES)
    with logging_to(context.directory(), writer, models="embedded*2") as tercet:
        load = Load(tercet.port, NUM_CLIENTS)
        with load.running():
            load.wait_for(context.amount(20, 2000), timeout_s=600)
            tercet.reload()
            load.wait_for(NUM_CLIENTS)
            page = tercet.ready()
        findings.require(page is not None and page["status"] == "ready", f"readiness: {page}")
        findings.none_of("failed", dict(count_failures(load.answers)))
        findings.figures["answers"] = len(load.answers)
        findings.at_least("records dropped and counted", tercet.num_dropped(), 1)
    for descriptor in (reader, writer):
        os.close(descriptor)


def run_out_of_resources(context: Context, findings: Findings) -> None:
    """R35. What lacks a resource answers 503 or leaves requests to the other slot, no process ends, and afterwards all
    requests are served."""
    with serving(as_unprivileged(context.directory())) as tercet:
        processes = tercet.processes()
        victims = {"gateway": processes["gateway"][1], "worker": processes["workers"][1]}
        for _ in range(context.amount(1, 5)):
            for name, process in victims.items():
                for resource, number in (("nproc", 1), ("nofile", process.num_fds())):
                    with limited(process.pid, resource, number), suppress(OSError):
                        during = Counter(statuses(tercet, 24))
                    findings.none_of(
                        f"{name} without {resource}: other than 200 and 503",
                        {str(status): count for status, count in during.items() if status not in {200, 503}},
                    )
                    until(lambda: statuses(tercet, 12) == [200] * 12, 30, f"all served again: {name}, {resource}")
        findings.figures["times that a resource ran out"] = 4 * context.amount(1, 5)
        findings.require(tercet.processes() == processes, "a process ended")
