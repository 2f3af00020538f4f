"""The keys that gateways and workers share (`TERCET_POOL_KEY`): a file with one key per line.

A gateway sends the first key, a worker accepts each. So a key is replaced without an interruption: the new key is added
as the last line everywhere, then made the first, then the old line is removed.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from pathlib import Path

from shared.errors import StartError
from shared.watched_files import WatchedFiles, open_file

MIN_KEY_CHARACTERS = 32
MAX_BYTES = 1 << 20  # of the file
_KEY = re.compile(r"[!-~]+")  # what a header can carry, without spaces


def read_pool_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, at least one.

    Raises:
        StartError: the file cannot be read, other users may read or write it, or a line is no key. The message holds
            no contents of the file.
    """
    remedy = "write it with `openssl rand -hex 32`, or correct the path"
    with open_file(path, f"key file {path} (TERCET_POOL_KEY)", remedy) as file:
        mode = os.fstat(file.fileno()).st_mode
        text = file.read(MAX_BYTES).decode("ascii", "replace")
    # Its group may read it: Kubernetes mounts a secret so for a user other than root.
    if mode & 0o027:
        raise StartError(
            f"The key file {path} (TERCET_POOL_KEY) may be read or written by other users: run `chmod 600 {path}`."
        )
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise StartError(f"The key file {path} (TERCET_POOL_KEY) holds no key: write one with `openssl rand -hex 32`.")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY_CHARACTERS or not _KEY.fullmatch(key):
            raise StartError(
                f"Key {number} of the file {path} (TERCET_POOL_KEY) is not {MIN_KEY_CHARACTERS} or more printable "
                "characters without spaces: write one with `openssl rand -hex 32`."
            )
    return keys


def watch_pool_keys(path: Path) -> WatchedFiles[tuple[str, ...]]:
    """The keys, read again when the file changes.

    Raises:
        StartError: as `read_pool_keys`.
    """
    return WatchedFiles("TERCET_POOL_KEY", (path,), lambda: read_pool_keys(path))


def is_pool_key(authorization: str, keys: Sequence[str]) -> bool:
    """Whether the value of an `Authorization` header is `Bearer` with one of the keys. Every key is compared, in
    constant time, so the time does not depend on which key matches."""
    scheme, _, candidate = authorization.partition(" ")
    given = candidate.strip().encode("utf-8", "surrogateescape")
    is_valid = False
    for key in keys:
        is_valid |= hmac.compare_digest(key.encode(), given)
    return is_valid and scheme.lower() == "bearer"
