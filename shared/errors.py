"""The one hierarchy of errors: each class carries its HTTP status and a stable machine code.

This module knows how an error is told to a caller (RFC 9457 problem details), never how it came about.
A dialect may render the same error in its own shape.

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
    StartError                      (never sent: one sentence that stops a start)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

PROBLEM_JSON = "application/problem+json"


class StartError(Exception):
    """Tercet cannot start as asked; the message is one sentence that says what to do."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field of a request, in words that name its range."""

    field: str
    message: str


class TercetError(Exception):
    """An error that a caller is told about. `detail` says what is wrong and what to do."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    title: ClassVar[str] = "Something went wrong inside Tercet"

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
        """HTTP headers that belong to this answer."""
        if self.retry_after_s is None:
            return self._headers
        return {**self._headers, "Retry-After": str(self.retry_after_s)}

    def problem(self, request_id: str | None = None) -> bytes:
        """The answer's body, `application/problem+json` (RFC 9457)."""
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
    status, code, title = 403, "forbidden_origin", "This web page may not use this server"


class NotFound(TercetError):
    status, code, title = 404, "not_found", "There is nothing at this path"


class MethodNotAllowed(TercetError):
    status, code, title = 405, "method_not_allowed", "This path does not take this method"


class Superseded(TercetError):
    status, code, title = 409, "superseded", "A newer request of the same session took its place"


class LengthRequired(TercetError):
    status, code, title = 411, "length_required", "The body's length is needed"


class BodyTooLarge(TercetError):
    status, code, title = 413, "body_too_large", "The body is too large"


class UnknownHost(TercetError):
    status, code, title = 421, "unknown_host", "This server does not answer to that Host"


class InvalidRequest(TercetError):
    status, code, title = 422, "invalid_request", "A field of the request is wrong"


class UnknownModel(InvalidRequest):
    code, title = "unknown_model", "That model is not served here"


class ClientGone(TercetError):
    """Nobody reads this answer; the status, nginx's, is for logs and metrics."""

    status, code, title = 499, "client_gone", "The client hung up"


class NotReady(TercetError):
    status, code, title = 503, "not_ready", "No model is ready yet"


class SlotFull(TercetError):
    status, code, title = 503, "slot_full", "This worker's batch is full"


class Overloaded(TercetError):
    status, code, title = 503, "overloaded", "Too many requests are waiting"


class NoCompletion(TercetError):
    status, code, title = 503, "no_completion", "No branch came back with a completion"


class DeadlineExceeded(TercetError):
    status, code, title = 504, "deadline_exceeded", "The time limit passed"
