"""Logging: JSON lines on standard error, one event per line, with role and slot, never with a prompt.

Tercet, gunicorn and libraries log through the same processors. Tercet's own events skip the `logging` module, which
takes many times as long. Standard error is what the supervisor, systemd and containers collect.
"""

from __future__ import annotations

import logging.config
import re
import secrets
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


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
    if sys.stderr.isatty():
        # By default it prints the local variables of each frame, and with them prompts.
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]


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
            # Tercet logs an event of its own per request, which holds more.
            "gunicorn.error": {"level": level.upper(), "handlers": ["stderr"], "propagate": False},
            "gunicorn.access": {"level": "CRITICAL", "handlers": ["stderr"], "propagate": False},
            "httpx": {"level": "WARNING"},
            "httpcore": {"level": "WARNING"},
        },
    }


def configure_structlog(role: str, level: str) -> None:
    """Configure Tercet's own events as `logging_config` configures those of libraries."""
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


def request_id(given: str | None) -> str:
    """The client's `X-Request-Id` if it is safe to log and to forward, else a new id of 64 random bits."""
    if given and _REQUEST_ID.fullmatch(given):
        return given
    return secrets.token_hex(8)
