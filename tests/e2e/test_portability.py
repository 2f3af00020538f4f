"""`tercet serve` without what only Linux has. It stands for macOS, where Tercet was never run; /proc stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.e2e.harness import Tercet, serving, until

# Every Python process of the instance runs this first. `selectors`, which `socket` imports, must find `select` changed.
SITE = """
import ctypes
from importlib import import_module
for module, names in {
    "select": "EPOLLERR EPOLLHUP EPOLLIN EPOLLONESHOT EPOLLOUT EPOLLRDHUP POLLRDHUP epoll",
    "fcntl": "F_SETSIG",
    "mmap": "MADV_HUGEPAGE MADV_NOHUGEPAGE",
    "os": "EFD_CLOEXEC EFD_NONBLOCK eventfd eventfd_read eventfd_write sched_getaffinity waitid",
    "socket": "TCP_KEEPIDLE TCP_USER_TIMEOUT",
}.items():
    for name in names.split():
        delattr(import_module(module), name)
def find_portable(library, name, find=ctypes.CDLL.__getattr__):
    return find(library, "absent" if name in {"malloc_trim", "mallopt", "prctl"} else name)
ctypes.CDLL.__getattr__ = find_portable
"""


def test_a_server_serves_restarts_and_stops_without_what_only_linux_has(short_tmp_path: Path) -> None:
    (short_tmp_path / "sitecustomize.py").write_text(SITE)
    tercet = Tercet(short_tmp_path / "base")
    tercet.environ["PYTHONPATH"] = os.pathsep.join([str(short_tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(tercet):
        assert len(tercet.ask()["sentences"]) == 3
        tercet.processes()["gateway"][0].send_signal(signal.SIGKILL)
        until(lambda: tercet.events("master_died"), 30, "the master's death is noticed")
        tercet.wait_until_warm()
        assert len(tercet.ask()["sentences"]) == 3
    assert "Traceback" not in tercet.log()
