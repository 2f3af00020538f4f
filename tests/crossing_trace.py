"""Writes down what the threads of a process do; `tests.crossing` puts it into every process of a server.

Python imports it as `sitecustomize`. While the first byte of the file `CROSSING_FLAG` is not zero, each process appends
to a file beside it a line for each call of a Python function, for each call of a C function that wakes another thread
or process, and for each return of one that waits.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

WAITS = {"acquire", "get", "recv", "recv_into", "poll", "select", "accept", "read", "eventfd_read"}
WAKES = {"release", "put", "send", "sendall", "sendmsg", "write", "eventfd_write"}

FLAG = Path(os.environ["CROSSING_FLAG"])
with FLAG.open("rb") as _flag:
    is_on = mmap.mmap(_flag.fileno(), 1, prot=mmap.PROT_READ)  # shared with the processes that this one forks
# A generated function, like a dataclass's __init__, has the globals of its module, but no file.
_files: dict[int, str] = {}
_output: tuple[int, int] = (0, -1)  # id of the process that opened it, file descriptor


def trace(frame: FrameType, event: str, arg: Any) -> None:
    if not is_on[0]:
        return
    if event == "call":
        code = frame.f_code
        if (file := _files.get(id(code))) is None:
            file = _files[id(code)] = str(frame.f_globals.get("__file__") or code.co_filename)
        _write("call", file, code.co_qualname)
    elif event == "c_call" and arg.__name__ in WAKES:
        _write("wakes", arg.__name__, str(id(arg.__self__)))
    elif event == "c_return" and arg.__name__ in WAITS:
        _write("woken", arg.__name__, str(id(arg.__self__)))


def _write(*fields: str) -> None:
    global _output  # noqa: PLW0603 - a process that was forked opens its own
    pid = os.getpid()
    if _output[0] != pid:
        path = FLAG.with_name(f"{pid}.trace")
        _output = pid, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    role = os.environ.get("TERCET_ROLE", "")
    thread = threading.current_thread()
    line = "\t".join((str(time.monotonic_ns()), role, str(pid), thread.name, f"{pid}.{thread.ident}", *fields))
    os.write(_output[1], line.encode() + b"\n")


threading.setprofile(trace)
sys.setprofile(trace)
