"""Values that are read from files, and read again when the files change: keys and certificates that are renewed while
the server runs. This module does not know what the files hold.

A file system can hang, for example over a network. So while the server runs, a thread of each value reads its files,
and requests take the value that it read last. At a start, a read that takes too long is an error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import structlog

from shared.errors import StartError
from shared.plain_files import open_plain

# The files are looked at this often, so a change takes effect after this time at the latest.
POLL_S = 1.0
# The longest that a start waits for files.
START_S = 3.0
T = TypeVar("T")
Signature = tuple[int, int, int, int]
log = structlog.get_logger()


class FilesUnsettled(Exception):
    """The files seem to be written at this moment: they are to be read again at the next look."""


class WatchedFiles(Generic[T]):
    """What `read` made of some files, made again when one of them has changed. Thread-safe.

    While the files cannot be read (one of two is replaced, a mount is gone or hangs) the last value stays.
    """

    def __init__(self, name: str, paths: Sequence[Path], read: Callable[[], T], *, initial: T | None = None) -> None:
        """
        Args:
            name: what the log calls the files.
            read: raises `StartError` where the files are wrong; its text holds no contents of them. May raise
                `FilesUnsettled` after the first time.
            initial: the value until the files can be read; None: they must be readable now, and no thread is started
                before `value` is used, so that the process may fork.

        Raises:
            StartError: of the first `read`, or that it takes too long, if there is no initial value.
        """
        self._name, self._paths, self._read = name, tuple(paths), read
        self._lock = threading.Lock()
        self._thread = threading.Thread()
        self._has_looked = threading.Event()
        self._signatures: list[Signature | None] = []
        if initial is not None:
            self._value = initial
            self._start()
            self._has_looked.wait(START_S)
        else:
            # Taken before the files are read: a change in between is seen at the next look.
            self._signatures, self._value = in_time(name, lambda: (self._sign(), read()))

    @property
    def value(self) -> T:
        """What was read last. Starts the thread again that a fork, or a lack of threads, has left out."""
        if self._paths and not self._thread.is_alive():
            self._start()
        return self._value

    def look(self) -> None:
        """Read the files if they have changed."""
        signatures = self._sign()
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

    def _start(self) -> None:
        with self._lock:
            if not self._thread.is_alive():
                thread = threading.Thread(target=self._watch, name=f"files-{self._name}", daemon=True)
                with suppress(RuntimeError):  # the next use of the value tries again
                    thread.start()
                    self._thread = thread

    def _watch(self) -> None:
        while True:
            try:
                self.look()
            except Exception as error:  # for example without memory: the next look may succeed
                log.error("unhandled_exception", exc_info=error)
            self._has_looked.set()
            time.sleep(POLL_S)

    def _sign(self) -> list[Signature | None]:
        return [file_signature(path) for path in self._paths]


def file_signature(path: Path) -> Signature | None:
    """Changes with the file; None while it cannot be looked at."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def open_file(path: Path, what: str, remedy: str = "correct the path") -> Iterator[BinaryIO]:
    """Open a regular file.

    Args:
        what: name of the file in the error, with its path.

    Raises:
        StartError: it cannot be read.
    """
    try:
        with open_plain(path) as file:
            yield file
    except OSError as error:
        raise StartError(f"The {what} cannot be read ({error.strerror}): {remedy}.") from error


def in_time(name: str, read: Callable[[], T]) -> T:
    """Read files in a thread, which has ended when this returns.

    Raises:
        StartError: it takes longer than `START_S`.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(read())
        except BaseException as error:  # noqa: BLE001 - raised below
            result.set_exception(error)

    thread = threading.Thread(target=run, name=f"files-{name}", daemon=True)
    thread.start()
    thread.join(START_S)
    if thread.is_alive():
        raise StartError(f"The file of {name} was not read within {START_S:g} s: check the file system that holds it.")
    return result.result()
