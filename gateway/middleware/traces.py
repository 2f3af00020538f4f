"""Middleware: the span of each request that may want a completion, the first or the client's next of its trace.

Installed only if traces are on. Reads `traceparent` and fills `req.context.traceparent`. Knows no resource, and exports
no more of a request than the request log does.
"""

from __future__ import annotations

from functools import partial

import falcon

from gateway.middleware.request_log import ObservedStream
from shared.tracing import Attribute, Tracing

# Probes, scrapes and page loads would hide the completions.
UNTRACED_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Traces:
    """Falcon middleware; the first of the list, so that a request's span covers all others."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        if req.method in UNTRACED_METHODS:
            return
        req.context.span = span = self._tracing.start(req.context.method, req.get_header("traceparent") or "", "server")
        req.context.traceparent = span.traceparent

    def process_response(self, req: falcon.Request, resp: falcon.Response, _resource: object, _ok: bool) -> None:
        if resp.stream is not None:
            resp.stream = ObservedStream(resp.stream, partial(self._end, req, resp))
        else:
            self._end(req, resp)

    def _end(self, req: falcon.Request, resp: falcon.Response) -> None:
        # Falcon refuses some methods before any middleware runs.
        span = getattr(req.context, "span", None)
        if span is None:
            return
        route, status = req.uri_template or "(none)", resp.status_code
        attributes: dict[str, Attribute] = {
            "http.request.method": req.context.method,
            "http.route": route,
            "http.response.status_code": status,
            "request_id": req.context.id,
        }
        span.rename(f"{req.context.method} {route}")
        span.set({**attributes, **req.context.log})
        span.end(str(status) if status >= 500 else None)
