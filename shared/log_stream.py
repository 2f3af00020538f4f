"""Standard output and standard error of a server: a write neither blocks nor fails.

A reader may stop or go away, and a disk may be full. A record that cannot be written is dropped and counted. A process
that forks has no thread, so it writes only what the descriptor takes at once; after the fork, `start_log_thread` puts a
bounded queue and a thread in between, which waits. Knows descriptors and text, not events.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TextIO, cast

MAX_QUEUED = 1000  # records
EXIT_WAIT_S = 0.5


class LogStream(io.TextIOBase):
    """What `sys.stdout` or `sys.stderr` is in a server. Thread-safe once its thread has started.

    Attributes:
        num_dropped: records dropped by this process, and by its master before the fork.
        resumed_line: the record to write when records are taken again, from the number of those dropped meanwhile.
    """

    def __init__(self, number: int) -> None:
        """
        Args:
            number: the inherited descriptor.
        """
        self.num_dropped = 0
        self.resumed_line: Callable[[int], str] | None = None
        self._number = number
        self._descriptor, self._max_piece = _unblocked(number)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._unsent = b""  # rest of a record that was written in part
        self._queue: SimpleQueue[bytes | threading.Event] | None = None
        self._lock = threading.Lock()
        self._num_reported = 0

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def fileno(self) -> int:
        """A descriptor on which a write does not block, as far as there is one: `faulthandler` writes to it."""
        return self._descriptor

    def write(self, text: str, /) -> int:
        record = text.encode(errors="backslashreplace")
        if self._queue is None:
            self._write(record, timeout_ms=0)
        elif self._queue.qsize() < MAX_QUEUED:
            self._queue.put(record)
        else:
            self._drop()
        return len(text)

    def start(self) -> None:
        """Let a thread write from now on. To be called after the last fork."""
        self._unsent, self._queue, self._num_reported = b"", SimpleQueue(), self.num_dropped
        threading.Thread(target=self._run, args=(self._queue,), name="log", daemon=True).start()
        atexit.register(self.finish)

    def finish(self) -> None:
        """Wait until the queued records are written, for at most `EXIT_WAIT_S`."""
        if self._queue is not None:
            written = threading.Event()
            self._queue.put(written)
            written.wait(EXIT_WAIT_S)

    def _run(self, queue: SimpleQueue[bytes | threading.Event]) -> None:
        while True:
            item = queue.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._write(item, timeout_ms=None)

    def _write(self, record: bytes, timeout_ms: int | None) -> None:
        """Write a record, or drop it; the rest of one that has begun follows with the next.

        Args:
            timeout_ms: longest wait for room; None waits for as long as it takes.
        """
        data = self._unsent + record
        try:
            while data and self._poll.poll(timeout_ms):
                with suppress(BlockingIOError):  # another process was faster
                    data = data[os.write(self._descriptor, data[: self._max_piece]) :]
        except OSError:
            data = record
        num_unsent = len(data) - len(record)  # of the record before; negative if this one has begun
        self._unsent = data if num_unsent < 0 else data[:num_unsent]
        if num_unsent >= 0 and record:
            self._drop()
        elif not data and (self._queue is None or self._queue.empty()):
            self._report()

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1

    def _report(self) -> None:
        """Write the line about the records dropped since the last one, if there are any."""
        num_new, self._num_reported = self.num_dropped - self._num_reported, self.num_dropped
        if num_new and self.resumed_line is not None:
            self._write(self.resumed_line(num_new).encode(), timeout_ms=0)


def open_standard_streams() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, on /dev/null.

    Else the next file or socket gets the number, and what prints writes into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - open as long as the process


def use_log_streams() -> None:
    """Let all that this process prints and logs go through log streams."""
    open_standard_streams()
    if not isinstance(sys.stderr, LogStream):
        sys.stdout, sys.stderr = cast(TextIO, LogStream(1)), cast(TextIO, LogStream(2))


def start_log_thread() -> None:
    if isinstance(sys.stderr, LogStream):
        sys.stderr.start()


def finish_log() -> None:
    """Write what is queued, for at most `EXIT_WAIT_S`. To be called before `os._exit`; other exits do so themselves."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.finish()


def num_dropped_records() -> int:
    return sys.stderr.num_dropped if isinstance(sys.stderr, LogStream) else 0


def _unblocked(number: int) -> tuple[int, int]:
    """A descriptor of the same file on which a write does not block, and the largest piece to write to it at once.

    O_NONBLOCK belongs to the open file, which other processes share, the shell of a terminal too; so pipes and
    terminals are opened once more. Regular files do not block. A socket, or another user's pipe, cannot be opened:
    there a write of at most PIPE_BUF bytes when it polls as writable blocks only if another process was faster.
    """
    mode = os.fstat(number).st_mode
    if stat.S_ISREG(mode):
        return number, sys.maxsize
    if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{number}", flags), sys.maxsize
    return number, select.PIPE_BUF
