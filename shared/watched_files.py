"""Values that are read from files, and read again when the files change: keys and certificates that are renewed while
the server runs. This module does not know what the files hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from shared.errors import StartError

# The files are looked at this often at most, so a change takes effect after this time at the latest.
POLL_S = 1.0
T = TypeVar("T")
Signature = tuple[int, int, int, int]
log = structlog.get_logger()


class FilesUnsettled(Exception):
    """The files seem to be written at this moment: they are to be read again at the next look."""


class WatchedFiles(Generic[T]):
    """What `read` made of some files, made again when one of them has changed. Thread-safe.

    While the files cannot be read (one of two is replaced, or a mount is gone) the last value stays.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        read: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
        *,
        initial: T | None = None,
    ) -> None:
        """
        Args:
            name: what the log calls the files.
            read: raises `StartError` where the files are wrong; its text holds no contents of them. May raise
                `FilesUnsettled` after the first time.
            clock: monotonic seconds.
            initial: the value until the files can be read; None: they must be readable now.

        Raises:
            StartError: of the first `read`, if there is no initial value.
        """
        self._name, self._paths, self._read, self._clock = name, tuple(paths), read, clock
        self._lock = threading.Lock()
        self._next_look_at = clock() + POLL_S
        self._signatures: list[Signature | None] = []
        if initial is not None:
            self._value = initial
            self._read_if_changed()
        else:
            # Taken before the files are read: a change in between is seen at the next look.
            self._signatures = self._look()
            self._value = read()

    @property
    def value(self) -> T:
        # Where another thread is already looking, this one uses what is known.
        if self._clock() >= self._next_look_at and self._lock.acquire(blocking=False):
            try:
                self._read_if_changed()
                self._next_look_at = self._clock() + POLL_S
            finally:
                self._lock.release()
        return self._value

    def _read_if_changed(self) -> None:
        signatures = self._look()
        if signatures == self._signatures:
            return
        try:
            self._value = self._read()
        except FilesUnsettled:
            return
        except StartError as error:
            log.error("files_not_read", files=self._name, reason=str(error))
        else:
            log.info("files_read", files=self._name)
        self._signatures = signatures

    def _look(self) -> list[Signature | None]:
        return [file_signature(path) for path in self._paths]


def file_signature(path: Path) -> Signature | None:
    """Changes with the file; None while it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
