"""Runs a command as a systemd unit would: with a system call filter and a passed socket. Needs libseccomp.

    python sandbox.py LISTENER SYSCALL[,SYSCALL…] COMMAND [ARGUMENT…]

LISTENER is the descriptor that becomes the passed socket (`sd_listen_fds(3)`). Other system calls fail with EPERM, as
`SystemCallErrorNumber=EPERM` has it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_ALLOW = 0x7FFF0000  # SCMP_ACT_ALLOW in <seccomp.h>
_ERRNO = 0x00050000  # SCMP_ACT_ERRNO(0)


def allow_only(names: list[str]) -> None:
    """Filter the system calls of this process and of all that it starts."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else it is one of other architectures
            assert library.seccomp_rule_add_array(context, ctypes.c_uint32(_ALLOW), number, 0, None) == 0, name
    assert library.seccomp_load(context) == 0


if __name__ == "__main__":
    listener, syscalls, *command = sys.argv[1:]
    os.dup2(int(listener), 3)
    os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
    allow_only(syscalls.split(","))
    os.execvp(command[0], command)
