"""How a dialect renders an error: status, headers' content type, body, and the last event of a stream.

A resource with an attribute `error_format` answers its errors in that format, those of the middleware included; one
with `error_formats` has a format for each of its methods. All others answer with problem details. Where the body
decides on the dialect, the resource sets `req.context.error_format`. Knows no resource.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import falcon

from shared.errors import PROBLEM_JSON, Problem, TercetError


class ErrorFormat(Protocol):
    """A dialect's errors.

    Attributes:
        content_type: media type of the bodies.
        body_type: the msgspec type of the bodies, for the OpenAPI document.
    """

    content_type: str
    body_type: Any

    def status(self, error: TercetError) -> int:
        """The HTTP status."""

    def body(self, error: TercetError, request_id: str) -> bytes:
        """The response's body."""

    def event(self, error: TercetError, request_id: str) -> bytes:
        """The last event of a stream that has begun, encoded."""


class ProblemDetails:
    """RFC 9457: `application/problem+json`, and an event with the name `error`."""

    content_type = PROBLEM_JSON
    body_type = Problem

    def status(self, error: TercetError) -> int:
        return error.status

    def body(self, error: TercetError, request_id: str) -> bytes:
        return error.problem(request_id)

    def event(self, error: TercetError, request_id: str) -> bytes:
        return b"event: error\ndata: %s\n\n" % error.problem(request_id).rstrip(b"\n")


PROBLEM_DETAILS: ErrorFormat = ProblemDetails()


def error_format_of(resource: object, method: str) -> ErrorFormat:
    """The format of the errors of a resource's method; the resource may be None."""
    default: ErrorFormat = getattr(resource, "error_format", PROBLEM_DETAILS)
    formats: Mapping[str, ErrorFormat] = getattr(resource, "error_formats", {})
    return formats.get(method, default)


def render_error(error: TercetError, error_format: ErrorFormat, request_id: str) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers and body of the response."""
    status = falcon.code_to_http_status(error_format.status(error))
    body = error_format.body(error, request_id)
    return status, {"Content-Type": error_format.content_type, **error.headers}, body
