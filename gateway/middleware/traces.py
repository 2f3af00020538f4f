"""Middleware: the span of each request that may want a completion, the first or the client's next of its trace.

Installed only if traces are on. Reads `traceparent` and fills `req.context.traceparent`. Knows no resource, and exports
no more of a request than the request log does.
"""

from __future__ import annotations

from functools import partial

import falcon

from gateway.metrics import NO_ROUTE
from gateway.middleware.request_log import ObservedStream
from shared.tracing import Attribute, Span, Tracing

# Probes, scrapes and page loads would hide the completions.
UNTRACED_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Traces:
    """Falcon middleware; the first of the list, so that a request's span covers all others."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        req.context.span = span = self.begin(req.context.method, req.get_header("traceparent"))
        if span is not None:
            req.context.traceparent = span.traceparent

    def process_response(self, req: falcon.Request, resp: falcon.Response, _resource: object, _ok: bool) -> None:
        if resp.stream is not None:
            resp.stream = ObservedStream(resp.stream, partial(self._end, req, resp))
        else:
            self._end(req, resp)

    def _end(self, req: falcon.Request, resp: falcon.Response) -> None:
        # Falcon refuses some methods before any middleware runs.
        span, route = getattr(req.context, "span", None), req.uri_template or NO_ROUTE
        self.end(span, req.context.method, route, resp.status_code, req.context.id, **req.context.log)

    def begin(self, method: str, traceparent: str | None) -> Span | None:
        return None if method in UNTRACED_METHODS else self._tracing.start(method, traceparent or "", "server")

    def end(
        self, span: Span | None, method: str, route: str, status: int, request_id: str, **attributes: Attribute
    ) -> None:
        if span is None:
            return
        span.rename(f"{method} {route}")
        span.set(
            {
                "http.request.method": method,
                "http.route": route,
                "http.response.status_code": status,
                "request_id": request_id,
                **attributes,
            }
        )
        span.end(str(status) if status >= 500 else None)
