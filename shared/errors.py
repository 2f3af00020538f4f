"""The error hierarchy: each class carries its HTTP status and a stable machine code.

This module renders an error for a client (RFC 9457 problem details) and does not know what raises it. A dialect may
render the same error in its own shape.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
from msgspec import Struct

PROBLEM_JSON = "application/problem+json"
_encode = msgspec.json.Encoder().encode


def draw_retry_after_s(minimum: int = 1) -> int:
    """Seconds for a `Retry-After` header: random, so that clients that were refused together do not return together."""
    return minimum + random.randrange(3)


class StartError(Exception):
    """Tercet cannot start with these settings. The message is one sentence that says what to change. Never sent to a
    client."""


@contextmanager
def refusing_os_errors(action: str, path: Path) -> Iterator[None]:
    """Raise an `OSError` (a full disk, a read-only file system) as a `StartError`.

    Args:
        action: what cannot be done, as in "The slot plan cannot be written to".
    """
    try:
        yield
    except OSError as error:
        raise StartError(
            f"{action} {path} ({error.strerror or error}): set TERCET_RUN_DIR to a directory with free space that this "
            "user can write."
        ) from error


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field of a request; the message names the field's range."""

    field: str
    message: str


class Problem(Struct, kw_only=True, omit_defaults=True):
    """The body of an error response (RFC 9457). `code` is stable and machine-readable, `detail` says what is wrong and
    what to change, `errors` names the fields that are wrong."""

    type: str
    title: str
    status: int
    code: str
    detail: str
    errors: tuple[FieldError, ...] = ()
    request_id: str | None = None


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
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.fields = fields
        self.headers = headers or {}

    def problem(self, request_id: str | None = None) -> bytes:
        """Body of the response, `application/problem+json` (RFC 9457)."""
        problem = Problem(
            type=f"urn:tercet:error:{self.code}",
            title=self.title,
            status=self.status,
            code=self.code,
            detail=self.detail,
            errors=self.fields,
            request_id=request_id,
        )
        return _encode(problem) + b"\n"


class TemporaryError(TercetError):
    """An error that may be gone when the request is sent again; the response says when to (`Retry-After`)."""

    def __init__(self, detail: str, *, retry_after_s: int = 1) -> None:
        """
        Args:
            retry_after_s: the time to wait at least.
        """
        super().__init__(detail, headers={"Retry-After": str(draw_retry_after_s(retry_after_s))})


def internal_error(request_id: str) -> TercetError:
    """The answer where an unexpected exception was logged. It says nothing about the exception."""
    return TercetError(f"The server's log has the reason, under request {request_id}.")


# The detail of a request in plain HTTP at a port with TLS.
SPEAKS_HTTPS = "This port speaks HTTPS: use https:// in the URL."


class MalformedRequest(TercetError):
    status, code, title = 400, "malformed_request", "Not a valid HTTP request"


class InvalidJson(TercetError):
    status, code, title = 400, "invalid_json", "The body is not a JSON object"


class Unauthorized(TercetError):
    status, code, title = 401, "unauthorized", "A valid API key is required"


class ForbiddenOrigin(TercetError):
    status, code, title = 403, "forbidden_origin", "Web origin not allowed"


class NotFound(TercetError):
    status, code, title = 404, "not_found", "Path not found"


class UnknownAnswer(NotFound):
    title = "Unknown answer"


class UnknownJob(NotFound):
    code, title = "unknown_job", "Unknown job"


class MethodNotAllowed(TercetError):
    status, code, title = 405, "method_not_allowed", "Method not allowed at this path"


class RequestTimeout(TercetError):
    status, code, title = 408, "request_timeout", "The request did not arrive in time"


class Superseded(TercetError):
    status, code, title = 409, "superseded", "Superseded by a newer request of the same session"


class JobExpired(TercetError):
    status, code, title = 410, "job_expired", "The job has expired"


class BodyTooLarge(TercetError):
    status, code, title = 413, "body_too_large", "The body is too large"


class UrlTooLong(TercetError):
    status, code, title = 414, "url_too_long", "The URL is too long"


class UnsupportedCoding(TercetError):
    status, code, title = 415, "unsupported_coding", "The body's Content-Encoding is not supported"


class UnknownHost(TercetError):
    status, code, title = 421, "unknown_host", "Host not allowed"


class InvalidRequest(TercetError):
    status, code, title = 422, "invalid_request", "Invalid field in the request"


def invalid_field(field: str, message: str) -> InvalidRequest:
    """The error of one field; the message completes "FIELD …"."""
    return InvalidRequest(f"{field} {message}.", fields=(FieldError(field, message),))


class PromptTooLong(InvalidRequest):
    """Prompt and new tokens together are more than the model's context; the detail gives the numbers of tokens."""

    code, title = "prompt_too_long", "The prompt is too long for the model"


class UnknownModel(InvalidRequest):
    code, title = "unknown_model", "Unknown model"


class QuotaExceeded(TemporaryError):
    status, code, title = 429, "quota_exceeded", "A limit of this API key or address is exceeded"


class HeadersTooLarge(TercetError):
    status, code, title = 431, "headers_too_large", "The request headers are too large"


class ClientGone(TercetError):
    """The client closed its connection, so no response is sent; logs and metrics use nginx's status 499."""

    status, code, title = 499, "client_gone", "The client closed the connection"


class NotReady(TemporaryError):
    status, code, title = 503, "not_ready", "No model is ready yet"


class SlotFull(TemporaryError):
    status, code, title = 503, "slot_full", "This worker's batch is full"


class Overloaded(TemporaryError):
    status, code, title = 503, "overloaded", "Too many requests are waiting"


class NoCompletion(TemporaryError):
    status, code, title = 503, "no_completion", "No branch returned a completion"


class JobsUnavailable(TemporaryError):
    status, code, title = 503, "jobs_unavailable", "The job store is unavailable"


class ShuttingDown(TemporaryError):
    status, code, title = 503, "shutting_down", "The server is shutting down"


class DeadlineExceeded(TemporaryError):
    status, code, title = 504, "deadline_exceeded", "The time limit was exceeded"


class JobAbandoned(TercetError):
    """Only inside a job's answer: its runners died."""

    status, code, title = 500, "job_abandoned", "The job could not be completed"
