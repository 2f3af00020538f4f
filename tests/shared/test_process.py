"""What processes may learn of each other's memory, and how their own is allocated."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from shared.process import forbid_core_dumps, proportional_set_size

NOBODY = 65534
# Bytes outside the heap that glibc takes for a block of 1 MiB, after one was freed: `hblkhd` of mallinfo2(3).
TAKE_LARGE_BLOCKS = """
import ctypes, sys
from shared.process import map_large_blocks
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
Usage = type("Usage", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in FIELDS.split()]})
usage = ctypes.CDLL(None).mallinfo2
usage.restype = Usage
if sys.argv[1] == "map":
    map_large_blocks()
del [bytearray(1 << 20)][0]
before = usage().hblkhd
block = bytearray(1 << 20)
print(usage().hblkhd - before)
"""


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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_large_blocks_stay_outside_the_heap_after_some_were_freed() -> None:
    def num_mapped_bytes(mode: str) -> int:
        command = [sys.executable, "-c", TAKE_LARGE_BLOCKS, mode]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)

    assert num_mapped_bytes("map") > 1 << 20
    assert num_mapped_bytes("leave") == 0  # what it is for
