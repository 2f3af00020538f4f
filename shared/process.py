"""What a process of either pool asks of the kernel for itself. Knows no role and no setting."""

from __future__ import annotations

import ctypes
import resource

_PR_SET_DUMPABLE = 4  # <linux/prctl.h>


def forbid_core_dumps() -> None:
    """A core dump would hold prompts and keys. The limit covers dumps to files; the flag also those to a handler."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
