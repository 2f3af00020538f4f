"""Keeps what was measured of a checkpoint on disk, so that each checkpoint is measured once.

Knows a checkpoint's files and those of the cache. Does not know what is measured.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from shared.plain_files import read_plain
from shared.weights import weight_files

T = TypeVar("T")
log = structlog.get_logger()


def measured_once(directory: Path, name: str, cache: Path | None, kind: type[T], measure: Callable[[], T]) -> T:
    """What `measure` returned for the checkpoint in `directory`, now or earlier.

    Args:
        name: of what is measured. What is measured otherwise has another name, so that older results are ignored.
        cache: the directory of results; where there is none, or it cannot be written to, the next call measures again.
        kind: the type of the result.
    """
    path = None if cache is None else cache / f"{_fingerprint(directory)}-{name}.json"
    if path is not None:
        try:
            return msgspec.json.decode(read_plain(path), type=kind)
        except (OSError, msgspec.MsgspecError):
            pass  # not measured yet, or cached in another format
    result = measure()
    if path is None:
        return result
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}")
        written.write_bytes(msgspec.json.encode(result))
        written.replace(path)  # whatever stood there
    except OSError as error:
        log.warning("measurement_discarded", path=str(path), reason=error.strerror)
    return result


def _fingerprint(directory: Path) -> str:
    """The cache key, from config.json and the weight files' names, sizes and times; weights are not read."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]
