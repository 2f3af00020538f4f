"""Logging: JSON lines on standard error, one event per line, with role and slot, never with a prompt.

Tercet, gunicorn and libraries log through the same processors. Tercet's own events skip the `logging` module, which
takes many times as long. Standard error is what systemd and containers collect; in a server it is a `LogStream`, on
which a write neither blocks nor fails.
"""

from __future__ import annotations

import atexit
import io
import logging.config
import os
import select
import stat
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from shared.errors import StartError
from shared.process import open_standard_streams

# torch raises RuntimeError.
ENVIRONMENT_ERRORS = (OSError, RuntimeError, ImportError, StartError)
MAX_QUEUED = 1000  # records
EXIT_WAIT_S = 0.5


class LogStream(io.TextIOBase):
    """What `sys.stdout` or `sys.stderr` is in a server. Thread-safe once its thread has started.

    A reader may stop or go away, and a disk may be full. A record that cannot be written is dropped and counted. A
    process that forks has no thread, so it writes only what the descriptor takes at once; after the fork,
    `start_log_thread` puts a bounded queue and a thread in between, which waits. Knows descriptors and text, not
    events.

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
            self._report(timeout_ms)

    def _drop(self) -> None:
        with self._lock:
            self.num_dropped += 1

    def _report(self, timeout_ms: int | None) -> None:
        """Write the line about records dropped since the last one, if there are any; `timeout_ms` as in `_write`."""
        num_new, self._num_reported = self.num_dropped - self._num_reported, self.num_dropped
        if num_new and self.resumed_line is not None:
            self._write(self.resumed_line(num_new).encode(), timeout_ms)


def _base_processors(role: str) -> list[Processor]:
    """Processors of every event, Tercet's own or a library's."""

    def add_role(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"role": role, **event}

    return [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_role,
    ]


def _renderers() -> list[Processor]:
    """Render an event as a line: aligned and coloured where standard error is a terminal, JSON elsewhere."""
    add_traceback = structlog.processors.ExceptionRenderer(format_traceback)
    if sys.stderr.isatty():
        # The default prints tracebacks itself, with local variables.
        return [add_traceback, structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [add_traceback, structlog.processors.JSONRenderer(_to_json)]


def format_traceback(exc_info: ExcInfo) -> str:
    """An exception and its causes, the first cause last: types and lines of code, without values.

    The text of an exception may repeat what a client sent: a `KeyError` its key, a `UnicodeError` a prompt. So only
    those of `ENVIRONMENT_ERRORS` are logged, which say what the machine or the installation lacks.
    """
    parts = []
    error: BaseException | None = exc_info[1]
    while error is not None:
        text = f": {error}" if isinstance(error, ENVIRONMENT_ERRORS) else ""
        parts.append(f"{type(error).__module__}.{type(error).__qualname__}{text}\n")
        parts += traceback.format_tb(error.__traceback__)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "".join(parts)


def _to_json(event: EventDict, default: Callable[[Any], Any]) -> str:
    return msgspec.json.encode(event, enc_hook=default).decode()


def logging_config(role: str, level: str) -> dict[str, Any]:
    """A `logging.config` dictionary for one process, also gunicorn's `logconfig_dict`.

    Args:
        role: "gateway", "workers" or "serve"; a field of every line.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "tercet": {
                "()": structlog.stdlib.ProcessorFormatter,
                "foreign_pre_chain": _base_processors(role),
                "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers()],
            }
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "tercet", "stream": "ext://sys.stderr"}},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {
            # Unless these two are configured here, gunicorn adds handlers of its own. Its access log is off because
            # Tercet logs an event of its own per request, which holds more. Below info, gunicorn logs the bytes of
            # requests that it could not parse, and they may hold a prompt.
            "gunicorn.error": {
                "level": "INFO" if level == "debug" else level.upper(),
                "handlers": ["stderr"],
                "propagate": False,
            },
            "gunicorn.access": {"level": "CRITICAL", "handlers": ["stderr"], "propagate": False},
            "httpx": {"level": "WARNING"},
            "httpcore": {"level": "WARNING"},
        },
    }


def configure_structlog(role: str, level: str) -> None:
    """Configure Tercet's own events as `logging_config` configures those of libraries."""
    if isinstance(sys.stderr, LogStream):
        processors = [*_base_processors(role), *_renderers()]

        def resumed_line(num_dropped: int) -> str:
            event: Any = {"event": "log_resumed", "num_dropped": num_dropped}
            for process in processors:
                event = process(None, "warning", event)
            return f"{event}\n"

        sys.stderr.resumed_line = resumed_line
    structlog.configure(
        processors=[*_base_processors(role), *_renderers()],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


def configure_logging(role: str, level: str) -> None:
    """Configure logging in a process that gunicorn does not configure."""
    logging.config.dictConfig(logging_config(role, level))
    configure_structlog(role, level)


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
