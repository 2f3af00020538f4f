"""Standard output and standard error of a server: a write neither blocks nor fails.

A reader may stop or go away, and a disk may be full. A record that cannot be written is dropped and counted. A process
that forks has no thread, so it writes only what the descriptor takes at once; after the fork, `start_log_thread` puts a
bounded queue and a thread in between, which may block. Knows descriptors and text, not events.
"""

from __future__ import annotations

import atexit
import io
import mmap
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
        resumed_line: the record to write when records are taken again, from the number of those dropped meanwhile.
    """

    def __init__(self, number: int) -> None:
        """
        Args:
            number: the inherited descriptor.
        """
        self._number = number
        self._descriptor, self._max_piece = _unblocked(number)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLOUT)
        self._unsent = b""  # rest of a record that was written in part
        self._queue: SimpleQueue[bytes | threading.Event] | None = None
        self._lock = threading.Lock()
        # Records dropped: by the process that forks, in memory that it shares with its children, and by this thread's.
        self._num_unblocked = memoryview(mmap.mmap(-1, 8)).cast("q")
        self._num_queued = 0
        self._num_reported = 0
        self.resumed_line: Callable[[int], str] | None = None

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def fileno(self) -> int:
        """A descriptor on which a write does not block, as far as there is one: `faulthandler` writes to it."""
        return self._descriptor

    @property
    def num_dropped(self) -> int:
        """Records dropped by this process and its master."""
        return self._num_queued + self._num_unblocked[0]

    def write(self, text: str, /) -> int:
        record = text.encode(errors="backslashreplace")
        if self._queue is None:
            self._write_unblocked(record)
        elif self._queue.qsize() < MAX_QUEUED:
            self._queue.put(record)
        else:
            self._drop()
        return len(text)

    def start(self) -> None:
        """Let a thread write from now on. To be called after the last fork."""
        self._unsent, self._queue, self._num_reported = b"", SimpleQueue(), 0
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
            elif self._write_blocking(item) and queue.empty() and (line := self._report()):
                self._write_blocking(line)

    def _write_blocking(self, record: bytes) -> bool:
        while record:
            try:
                record = record[os.write(self._number, record) :]
            except BlockingIOError:  # a process that shares the file has made it non-blocking
                select.select([], [self._number], [])
            except OSError:
                self._drop()
                return False
        return True

    def _write_unblocked(self, record: bytes) -> None:
        data, num_written = self._unsent + record, 0
        try:
            while num_written < len(data) and self._poll.poll(0):
                num_written += os.write(self._descriptor, data[num_written:][: self._max_piece])
        except BlockingIOError:
            pass
        except OSError:
            self._unsent, num_written, data = b"", 0, record
        if num_written > len(self._unsent) or not record:
            self._unsent = data[num_written:]  # follows with the next record
        else:
            self._unsent = self._unsent[num_written:]
            self._drop()
        if not self._unsent and num_written and (line := self._report()):
            self._write_unblocked(line)

    def _drop(self) -> None:
        if self._queue is None:
            self._num_unblocked[0] += 1
            return
        with self._lock:
            self._num_queued += 1

    def _report(self) -> bytes:
        """The line about records that were dropped since the last one; empty if there are none."""
        num_dropped = self._num_unblocked[0] if self._queue is None else self._num_queued
        num_new, self._num_reported = num_dropped - self._num_reported, num_dropped
        return self.resumed_line(num_new).encode() if num_new and self.resumed_line is not None else b""


def use_log_streams() -> None:
    """Let all that this process prints and logs go through log streams."""
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
    """Log records dropped by this process and its master."""
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
