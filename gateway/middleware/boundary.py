"""What holds for every path: request ids, who may ask, how large a body may be, and one log line a request.

`curl -d '{…}'` sends no JSON content type, and people type that, so bodies are read as JSON whatever they call
themselves. A browser page of a foreign origin could then post here without asking first; so an `Origin` must be
our own or listed, and `Host` must be ours (a page may have bound its own name to this address).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import falcon
import structlog

from gateway.metrics import Metrics
from shared.errors import (
    PROBLEM_JSON,
    BodyTooLarge,
    ForbiddenOrigin,
    LengthRequired,
    MethodNotAllowed,
    NotFound,
    TercetError,
    UnknownHost,
)
from shared.settings import Settings
from shared.telemetry import request_id

EXAMPLE = """curl -d '{{"context": "The old man looked at the sea and"}}' {url}/autocomplete"""
log = structlog.get_logger()


class Boundary:
    """Falcon middleware for all routes."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        req.context.start = time.monotonic()
        req.context.id = request_id(req.get_header("X-Request-Id"))
        req.context.timing = {}
        req.context.log = {}
        resp.set_header("X-Request-Id", req.context.id)
        self._check_host(req)
        self._check_origin(req, resp)
        if req.method == "POST":
            self._check_length(req)

    def process_response(self, req: falcon.Request, resp: falcon.Response, _resource: object, _ok: bool) -> None:
        if resp.stream is not None:  # its time is over when its last byte is out
            resp.stream = _Ending(resp.stream, partial(self._account, req, resp))
            return
        timing = {**req.context.timing, "total": (time.monotonic() - req.context.start) * 1e3}
        resp.set_header("Server-Timing", ", ".join(f"{name};dur={ms:.2f}" for name, ms in timing.items()))
        self._account(req, resp)

    def _account(self, req: falcon.Request, resp: falcon.Response) -> None:
        seconds = time.monotonic() - req.context.start
        route = req.uri_template or "(none)"
        status = resp.status_code
        self._metrics.requests.labels(route=route, status=str(status)).inc()
        self._metrics.seconds.labels(route=route).observe(seconds)
        level = log.debug if req.method == "GET" else log.info
        level(
            "request_finished", request_id=req.context.id, method=req.method, route=route, status=status,
            ms=round(seconds * 1e3, 2), **req.context.log,
        )  # fmt: skip

    def _check_host(self, req: falcon.Request) -> None:
        host = req.get_header("Host") or ""
        if not self._settings.allows_host(host):
            raise UnknownHost(f"Host {host!r} is not served here; add its name to TERCET_HOSTS.")

    def _check_origin(self, req: falcon.Request, resp: falcon.Response) -> None:
        origin = req.get_header("Origin")
        if origin is None:
            return
        # The scheme is a proxy's business; the Host was checked above.
        is_own = origin.partition("://")[2] == req.get_header("Host")
        if not is_own and origin not in self._settings.origins:
            raise ForbiddenOrigin(f"Pages of {origin!r} may not use this server; add it to TERCET_ORIGINS.")
        if not is_own:
            resp.set_header("Access-Control-Allow-Origin", origin)
            resp.set_header("Access-Control-Expose-Headers", "X-Request-Id, Server-Timing, Retry-After")
            resp.append_header("Vary", "Origin")
        if req.method == "OPTIONS" and req.get_header("Access-Control-Request-Method"):
            resp.set_header("Access-Control-Allow-Methods", "GET, POST, DELETE")
            resp.set_header("Access-Control-Allow-Headers", "Content-Type, Authorization, X-Request-Id")
            resp.set_header("Access-Control-Max-Age", "600")
            resp.status = falcon.HTTP_204
            resp.complete = True

    def _check_length(self, req: falcon.Request) -> None:
        """Before a byte of the body is read. A chunked body would read as an empty one."""
        most = self._settings.max_body_bytes
        if req.get_header("Transfer-Encoding") or req.content_length is None:
            raise LengthRequired("Send a Content-Length; a chunked body is not taken.")
        if req.content_length > most:
            raise BodyTooLarge(
                f"The body has {req.content_length} bytes and may have {most} (TERCET_MAX_BODY_BYTES); "
                "send only the end of the document."
            )


class _Ending:
    """A streamed body with something to be done when it has been sent, or given up."""

    def __init__(self, stream: Any, at_end: Callable[[], None]) -> None:
        self._stream = stream
        self._at_end = at_end

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._at_end()


def render_error(req: falcon.Request, resp: falcon.Response, error: TercetError, _params: object) -> None:
    """Any of our errors, as problem+json."""
    resp.status = falcon.code_to_http_status(error.status)
    resp.content_type = PROBLEM_JSON
    resp.text = None
    resp.data = error.problem(req.context.id)
    resp.set_headers(error.headers)


def render_http_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError, params: object) -> None:
    """Falcon's own errors, in our words."""
    render_error(req, resp, _translate(req, error), params)


def render_unknown(req: falcon.Request, resp: falcon.Response, error: Exception, params: object) -> None:
    """What nobody foresaw: logged in full, answered generically."""
    log.error("unhandled_exception", request_id=req.context.id, method=req.method, path=req.path, exc_info=error)
    told = TercetError(f"The server's log has the reason, under request {req.context.id}.")
    render_error(req, resp, told, params)


def _translate(req: falcon.Request, error: falcon.HTTPError) -> TercetError:
    if isinstance(error, falcon.HTTPMethodNotAllowed):
        allowed = (error.headers or {}).get("Allow", "") if isinstance(error.headers, dict) else ""
        url = f"http://{req.get_header('Host')}"
        hint = f" Try: {EXAMPLE.format(url=url)}" if "POST" in allowed else ""
        return MethodNotAllowed(f"{req.path} takes {allowed}, not {req.method}.{hint}", headers={"Allow": allowed})
    if isinstance(error, falcon.HTTPNotFound):
        return NotFound(f"{req.path} is not served here; try POST /autocomplete, GET /health/ready or GET /metrics.")
    return _Foreign(error)


class _Foreign(TercetError):
    """An error of Falcon's that has no counterpart of ours (a malformed header, say)."""

    def __init__(self, error: falcon.HTTPError) -> None:
        super().__init__(error.description or error.title or "The request was not understood.")
        # Class variables elsewhere; here they are the foreign error's.
        self.status = error.status_code  # type: ignore[misc]
        self.code = "bad_request"  # type: ignore[misc]
        self.title = error.title or "Bad request"  # type: ignore[misc]
