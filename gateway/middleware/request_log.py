"""Middleware: request ids, the `Server-Timing` header, one log line per request, and the request metrics.

`Request` fills `req.context`: `id`, `method` (as it is logged), `owner` (the id of the API key; "" until it is known),
`key` (the key's record; None until it is known), `timing` (phases of the request in milliseconds, by name), `log`
(further fields of the log line), `num_ignored` (unknown fields of the body), `is_refused` (the server is too busy to
start it), `error_format` (of a request whose body decides on the dialect), `session` (from a header) and `traceparent`
(of the request's span; "": none). Others may set all but the first two, and add `charge`, which counts bytes of the
request's owner. Of what a client sends, only a request id of harmless characters is logged as it is. This module knows
no resource, and no reason why a request is refused.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import falcon
import structlog

from gateway.metrics import NO_ROUTE, Metrics
from shared.api_keys import KEY_PREFIX

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
log = structlog.get_logger()


class Request(falcon.Request):
    """A request with its context filled in: Falcon refuses some methods before any middleware runs."""

    def __init__(self, env: dict[str, Any], options: falcon.RequestOptions | None = None) -> None:
        super().__init__(env, options)
        self.context.start = time.monotonic()
        self.context.id = request_id(self.get_header("X-Request-Id"))
        self.context.method = shown_method(self.method)
        self.context.owner = ""
        self.context.key = None
        self.context.is_refused = False
        self.context.error_format = None
        self.context.session = None
        self.context.traceparent = ""
        self.context.timing = {}
        self.context.log = {}
        self.context.num_ignored = 0


class RequestLog:
    """Falcon middleware; before all that may refuse a request, so that refusals are logged and counted too."""

    def __init__(self, metrics: Metrics) -> None:
        self._request_counter = cache(metrics.requests.labels)
        self._request_seconds = cache(metrics.seconds.labels)

    def process_response(self, req: falcon.Request, resp: falcon.Response, _resource: object, _ok: bool) -> None:
        resp.set_header("X-Request-Id", req.context.id)
        if resp.stream is not None:
            # The headers leave before the body is complete, so the total would be wrong in `Server-Timing`.
            resp.stream = ObservedStream(resp.stream, partial(self._record, req, resp))
            return
        resp.set_header("Server-Timing", timing(time.monotonic() - req.context.start, **req.context.timing))
        self._record(req, resp)

    def _record(self, req: falcon.Request, resp: falcon.Response) -> None:
        context = req.context
        key = {"key": context.owner} if context.owner else {}
        # How many, not which: names are a client's words, and as many as it likes.
        ignored = {"unknown_fields": context.num_ignored} if context.num_ignored else {}
        fields = key | ignored | context.log
        # The template, not the path: a label value per unknown path would grow the metrics without bound.
        route, seconds = req.uri_template or NO_ROUTE, time.monotonic() - context.start
        self.record(
            context.id, context.method, route, resp.status_code, seconds, is_refused=context.is_refused, **fields
        )

    def record(
        self, request_id: str, method: str, route: str, status: int, seconds: float, *, is_refused: bool, **fields: Any
    ) -> None:
        """Count and log an answer. `fields`: further ones of the log line."""
        self._request_counter(route, str(status)).inc()
        self._request_seconds(route).observe(seconds)
        # Probes, scrapes and page loads would hide the completions at level info. Under overload, most requests are
        # refused, and writing a line for each would take time from those that are not; the metrics count them.
        write = log.debug if method in {"GET", "HEAD"} or is_refused else log.info
        ms = round(seconds * 1e3, 2)
        write("request_finished", request_id=request_id, method=method, route=route, status=status, ms=ms, **fields)


def timing(seconds: float, **phases: float) -> str:
    """The header `Server-Timing`: of phases in milliseconds, and of the whole."""
    return ", ".join(f"{name};dur={ms:.2f}" for name, ms in (*phases.items(), ("total", seconds * 1e3)))


def shown_method(method: str) -> str:
    """The method as it is logged: a client may send any word, even a key."""
    return method if method in falcon.HTTP_METHODS else "(other)"


def request_id(given: str | None) -> str:
    """The client's `X-Request-Id` if it is safe to log and to forward, else a new id of 64 random bits."""
    if given and _REQUEST_ID.fullmatch(given) and KEY_PREFIX not in given:
        return given
    return secrets.token_hex(8)


class ObservedStream:
    """A streamed body that calls back when the server closes it, after the last byte or after a hang-up."""

    def __init__(self, stream: Any, on_close: Callable[[], None]) -> None:
        self._stream = stream
        self._on_close = on_close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._on_close()
