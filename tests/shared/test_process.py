"""What processes may learn of each other's memory."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from shared.process import forbid_core_dumps, proportional_set_size

NOBODY = 65534


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux, and root to become another user")
def test_the_memory_of_a_process_that_may_not_dump_core_is_known_to_its_user() -> None:
    """`tercet tune` reads that of workers."""
    ready, tell_ready = os.pipe()
    worker = os.fork()
    if not worker:
        os.setuid(NOBODY)
        forbid_core_dumps()
        os.write(tell_ready, b".")
        signal.pause()
    os.read(ready, 1)
    found, tell_found = os.pipe()
    reader = os.fork()
    if not reader:
        os.setuid(NOBODY)
        try:
            os.write(tell_found, b"%d" % proportional_set_size(worker))
        finally:
            os._exit(0)
    os.close(tell_found)
    num_bytes = os.read(found, 20)
    os.kill(worker, signal.SIGKILL)
    for pid in (worker, reader):
        os.waitpid(pid, 0)
    for descriptor in (ready, tell_ready, found):
        os.close(descriptor)
    assert int(num_bytes) > 1_000_000
