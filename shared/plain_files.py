"""Reads files of which only the name is known: never a pipe or a device, and never more than a bound."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import time
from io import BufferedReader
from pathlib import Path

# Of a JSON file of a checkpoint: a tokenizer with 250,000 tokens takes 33 MB.
MAX_JSON_BYTES = 200_000_000
LOCK_POLL_S = 0.02


def open_plain(path: Path) -> BufferedReader:
    """The file at `path`, open for reading. Opening a pipe would wait for its other end, so nothing is waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file")
    return file


def read_plain(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of the file at `path`.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than `max_bytes`.
    """
    with open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"{path.name} has {size} bytes, and at most {max_bytes} are read")
        return file.read(max_bytes)


def open_lock(path: Path, timeout_s: float = math.inf) -> BufferedReader:
    """The lock file at `path`, made if missing, with its lock held until it is closed. No child process inherits it.

    Raises:
        OSError: it cannot be opened, or another process holds the lock for `timeout_s`, as a `TimeoutError`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = open(os.open(path, flags, 0o600), "rb")  # noqa: SIM115
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() >= end:
                file.close()
                raise TimeoutError(errno.ETIMEDOUT, f"another process holds {path}") from error
            time.sleep(LOCK_POLL_S)
