"""What a process of either pool asks of the kernel for itself. Knows no role and no setting."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path
from typing import Literal

PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4  # <linux/prctl.h>
_M_MMAP_THRESHOLD = -3  # <malloc.h>
# glibc's default before it has adapted it.
MMAP_THRESHOLD_BYTES = 128 << 10
_mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 1)  # only glibc has it
prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)  # only Linux has it


def forbid_core_files() -> None:
    """For this process and those that it starts: a core dump of a master or the supervisor would hold keys."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def forbid_core_dumps() -> None:
    """A core dump would hold prompts and keys. The limit covers dumps to files; the flag also those to a handler."""
    forbid_core_files()
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def map_large_blocks() -> None:
    """Keep memory blocks of at least `MMAP_THRESHOLD_BYTES` out of the heap, for good.

    glibc maps large blocks outside its heap, but raises its threshold to the size of each that is freed, up to 32 MiB
    (mallopt(3)). Blocks of megabytes that come and go, like tables that grow and bodies of requests, are then cut out
    of the heap, where small blocks that stay fill the gaps, and the heap grows.
    """
    _mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def proportional_set_size(pid: int | None = None, field: Literal["Pss", "Pss_Anon"] = "Pss") -> int:
    """A process's memory in bytes; a page that n processes share counts 1/n ("smaps_rollup" in proc(5)).

    Of another process that may not dump core, the kernel tells only root: others get the resident set, in which shared
    pages count in full.

    Args:
        pid: None is this process.
        field: `Pss_Anon` is the part that no file backs.

    Raises:
        OSError: the process has ended, or the kernel does not say.
    """
    try:
        rollup = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text()
    except PermissionError:
        num_pages = int(Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1])
        return num_pages * resource.getpagesize()
    for line in rollup.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/{pid or 'self'}/smaps_rollup has no {field}")


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, which is infinite on macOS: there to its OPEN_MAX."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = hard if sys.platform == "linux" else min(hard, 10240)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_standard_streams() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, on /dev/null.

    Else the next file or socket gets the number, and what prints writes into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - open as long as the process
