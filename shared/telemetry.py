"""Logging: JSON lines on standard error, one event per line, with role and slot, never with a prompt.

Tercet, gunicorn and libraries log through the same processors. Tercet's own events skip the `logging` module, which
takes many times as long. Standard error is what systemd and containers collect; in a server it is a `LogStream`.
"""

from __future__ import annotations

import logging.config
import sys
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from shared.errors import StartError
from shared.log_stream import LogStream

# torch raises RuntimeError.
ENVIRONMENT_ERRORS = (OSError, RuntimeError, ImportError, StartError)


def _base_processors(role: str) -> list[Processor]:
    """Processors of every event, Tercet's own or a library's."""

    def add_role(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"role": role, **event}

    return [
        structlog.contextvars.merge_contextvars,
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
