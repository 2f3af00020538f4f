"""The error hierarchy: each class carries its HTTP status and a stable machine code.

This module renders an error for a client (RFC 9457 problem details) and does not know what raises it. A dialect may
render the same error in its own shape.

    TercetError
    ├── InvalidJson 400             ├── Superseded 409
    ├── ForbiddenOrigin 403         ├── ClientGone 499
    ├── NotFound 404                ├── NotReady 503
    ├── MethodNotAllowed 405        ├── SlotFull 503
    ├── LengthRequired 411          ├── Overloaded 503
    ├── BodyTooLarge 413            ├── NoCompletion 503
    ├── UnknownHost 421             └── DeadlineExceeded 504
    └── InvalidRequest 422
        └── UnknownModel 422
    StartError                      (never sent to a client: stops the start)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

PROBLEM_JSON = "application/problem+json"


class StartError(Exception):
    """Tercet cannot start with these settings. The message is one sentence that says what to change."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field of a request; the message names the field's range."""

    field: str
    message: str


class TercetError(Exception):
    """An error that is sent to the client. `detail` says what is wrong and what to change."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Internal server error"

    def __init__(
        self,
        detail: str,
        *,
        fields: tuple[FieldError, ...] = (),
        retry_after_s: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields
        self.retry_after_s = retry_after_s
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the response."""
        if self.retry_after_s is None:
            return self._headers
        return {**self._headers, "Retry-After": str(self.retry_after_s)}

    def problem(self, request_id: str | None = None) -> bytes:
        """Body of the response, `application/problem+json` (RFC 9457)."""
        body: dict[str, Any] = {
            "type": f"urn:tercet:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
        }
        if self.fields:
            body["errors"] = [{"field": f.field, "message": f.message} for f in self.fields]
        if request_id is not None:
            body["request_id"] = request_id
        return msgspec.json.encode(body) + b"\n"


class InvalidJson(TercetError):
    status, code, title = 400, "invalid_json", "The body is not a JSON object"


class ForbiddenOrigin(TercetError):
    status, code, title = 403, "forbidden_origin", "Web origin not allowed"


class NotFound(TercetError):
    status, code, title = 404, "not_found", "Path not found"


class MethodNotAllowed(TercetError):
    status, code, title = 405, "method_not_allowed", "Method not allowed at this path"


class Superseded(TercetError):
    status, code, title = 409, "superseded", "Superseded by a newer request of the same session"


class LengthRequired(TercetError):
    status, code, title = 411, "length_required", "Content-Length is required"


class BodyTooLarge(TercetError):
    status, code, title = 413, "body_too_large", "The body is too large"


class UnknownHost(TercetError):
    status, code, title = 421, "unknown_host", "Host not allowed"


class InvalidRequest(TercetError):
    status, code, title = 422, "invalid_request", "Invalid field in the request"


class UnknownModel(InvalidRequest):
    code, title = "unknown_model", "Unknown model"


class ClientGone(TercetError):
    """The client closed its connection, so no response is sent; logs and metrics use nginx's status 499."""

    status, code, title = 499, "client_gone", "The client closed the connection"


class NotReady(TercetError):
    status, code, title = 503, "not_ready", "No model is ready yet"


class SlotFull(TercetError):
    status, code, title = 503, "slot_full", "This worker's batch is full"


class Overloaded(TercetError):
    status, code, title = 503, "overloaded", "Too many requests are waiting"


class NoCompletion(TercetError):
    status, code, title = 503, "no_completion", "No branch returned a completion"


class DeadlineExceeded(TercetError):
    status, code, title = 504, "deadline_exceeded", "The time limit was exceeded"
