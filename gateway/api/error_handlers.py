"""Error responses: every exception of a request becomes one body in the format of its resource's dialect.

Three sources: our own errors, Falcon's HTTP errors, and everything else. The last is a bug: it is logged with its
traceback, and the response says nothing about it but the request id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import falcon
import structlog

from gateway.api.error_formats import error_format_of, render_error
from gateway.api.openai import error_format as openai
from gateway.metrics import NO_ROUTE, Metrics
from shared.errors import (
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
    NotReady,
    Overloaded,
    QuotaExceeded,
    ShuttingDown,
    TercetError,
    internal_error,
)

EXAMPLE = """curl -d '{{"context": "The old man looked at the sea and"}}' {url}/autocomplete"""
# Requests that are refused without being started, because there are too many of them or too little to serve them.
REFUSALS = (NotReady, Overloaded, QuotaExceeded, ShuttingDown)
log = structlog.get_logger()


def add_error_handlers(
    app: falcon.App[Any, Any],
    find_resource: Callable[[str], object],
    find_near: Callable[[str], str | None],
    metrics: Metrics,
    public_url: str | None,
) -> None:
    """Render every exception of this app's routes and middleware here. Falcon picks the most specific handler.

    Args:
        find_resource: the resource that a path is routed to, or None.
        find_near: methods and path of the route that was probably meant by a path, or None.
        public_url: where clients reach this server; None: at the request's host.
    """

    def render(req: falcon.Request, resp: falcon.Response, error: TercetError, _params: object) -> None:
        # Found anew: an exception of the middleware comes before Falcon has looked for the resource.
        error_format = req.context.error_format or error_format_of(find_resource(req.path), req.method)
        resp.status, headers, resp.data = render_error(error, error_format, req.context.id)
        resp.set_headers(headers)

    def render_refusal(req: falcon.Request, resp: falcon.Response, error: TercetError, params: object) -> None:
        metrics.refused_requests.labels(reason=error.code).inc()
        req.context.is_refused = True
        render(req, resp, error, params)

    def render_http_error(req: falcon.Request, resp: falcon.Response, error: falcon.HTTPError, params: object) -> None:
        if error.status_code >= 500:
            render_unexpected(req, resp, error, params)
        else:
            render(req, resp, _translate(req, error, find_near, public_url), params)

    def render_unexpected(req: falcon.Request, resp: falcon.Response, error: Exception, params: object) -> None:
        log.error(
            "unhandled_exception",
            request_id=req.context.id,
            method=req.context.method,
            route=req.uri_template or NO_ROUTE,
            exc_info=error,
        )
        render(req, resp, internal_error(req.context.id), params)

    app.add_error_handler(Exception, render_unexpected)
    app.add_error_handler(falcon.HTTPError, render_http_error)
    app.add_error_handler(TercetError, render)
    for refusal in REFUSALS:
        app.add_error_handler(refusal, render_refusal)


def _translate(
    req: falcon.Request,
    error: falcon.HTTPError,
    find_near: Callable[[str], str | None],
    public_url: str | None,
) -> TercetError:
    """Our error for Falcon's. Falcon's descriptions are fixed texts that name a header."""
    if isinstance(error, falcon.HTTPMethodNotAllowed):
        allowed = (error.headers or {}).get("Allow", "") if isinstance(error.headers, dict) else ""
        url = public_url or f"{req.scheme}://{req.get_header('Host')}"
        hint = f" Try: {EXAMPLE.format(url=url)}" if "POST" in allowed else ""
        return MethodNotAllowed(f"{req.path} takes {allowed}, not {req.method}.{hint}", headers={"Allow": allowed})
    if isinstance(error, falcon.HTTPNotFound):
        near = find_near(req.path)
        if req.path.startswith(openai.PREFIX) and (near is None or openai.PREFIX in near):
            hint = openai.SERVED
        elif near is None:
            hint = "try POST /autocomplete, GET /health/ready or GET /metrics."
        else:
            hint = f"did you mean {near}?"
        return NotFound(f"{req.path} is not served here; {hint}")
    if req.method not in falcon.HTTP_METHODS:
        return MalformedRequest(f"The method must be one of {', '.join(falcon.HTTP_METHODS)}, in capital letters.")
    return MalformedRequest(error.description or "The request was not understood.")
