"""Reads files of which only the name is known: never a pipe or a device, and never more than a bound."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

# Of a JSON file of a checkpoint: a tokenizer with 250,000 tokens takes 33 MB.
MAX_JSON_BYTES = 200_000_000


def open_plain(path: Path) -> BufferedReader:
    """The file at `path`, open for reading. Opening a pipe would wait for its other end, so nothing is waited for.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a plain file")
    return file


def read_plain(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The content of the file at `path`.

    Raises:
        OSError: it cannot be read, is no plain file, or is larger than `max_bytes`.
    """
    with open_plain(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            raise OSError(f"{path} has {size} bytes, and at most {max_bytes} are read")
        return file.read(max_bytes)
