"""Logs and their rules: JSON lines on standard error, one event each, with role and slot, never with a prompt.

Everything that logs (Tercet, gunicorn, libraries) goes through the same processors: our own lines at once, those of
others from `logging`, which takes many times as long. Standard error is where the supervisor, systemd and containers
look.
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


def _common(role: str) -> list[Processor]:
    """What every line gets, whoever logs it."""

    def add_role(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {"role": role, **event}

    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_role,
    ]


def _renderers() -> list[Processor]:
    """An event becomes a line: aligned and coloured where standard error is a terminal, JSON elsewhere."""
    if sys.stderr.isatty():
        return [structlog.dev.ConsoleRenderer()]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]


def _to_json(event: EventDict, default: Callable[[Any], Any]) -> str:
    return msgspec.json.encode(event, enc_hook=default).decode()


def logging_config(role: str, level: str) -> dict[str, Any]:
    """A `logging.config` dictionary for one process, also gunicorn's `logconfig_dict`.

    Args:
        role: "gateway", "workers" or "serve"; stands in every line.
    """
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "tercet": {
                "()": structlog.stdlib.ProcessorFormatter,
                "foreign_pre_chain": _common(role),
                "processors": [structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers()],
            }
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "tercet", "stream": "ext://sys.stderr"}},
        "root": {"level": level.upper(), "handlers": ["stderr"]},
        "loggers": {
            # gunicorn gives these two handlers of its own unless they are named here; our own line per request
            # says more than its access log.
            "gunicorn.error": {"level": level.upper(), "handlers": ["stderr"], "propagate": False},
            "gunicorn.access": {"level": "CRITICAL", "handlers": ["stderr"], "propagate": False},
            "httpx": {"level": "WARNING"},
            "httpcore": {"level": "WARNING"},
        },
    }


def configure_structlog(role: str, level: str) -> None:
    """Set up the lines of our own, as `logging_config` does it for those of others."""
    structlog.configure(
        processors=[*_common(role), *_renderers()],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


def configure_logging(role: str, level: str) -> None:
    """Set up the logs of a process that gunicorn does not set up."""
    logging.config.dictConfig(logging_config(role, level))
    configure_structlog(role, level)


def request_id(given: str | None) -> str:
    """The caller's `X-Request-Id` where it is harmless to log and to send on, else a new one (64 random bits)."""
    if given and _REQUEST_ID.fullmatch(given):
        return given
    return secrets.token_hex(8)
