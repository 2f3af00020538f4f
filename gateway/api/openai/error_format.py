"""Errors in the shape of OpenAI's API. Knows no resource."""

from __future__ import annotations

import msgspec

from gateway.api import sse
from gateway.api.error_formats import ErrorFormat
from gateway.api.openai.schema import ErrorBody, ErrorObject
from gateway.api.operation import JSON
from gateway.generation.request import BranchFailure
from gateway.generation.selection import no_completion_error
from shared.errors import (
    FieldError,
    InvalidRequest,
    PromptTooLong,
    QuotaExceeded,
    TercetError,
    Unauthorized,
    UnknownModel,
)

_encode = msgspec.json.Encoder().encode


class OpenAIErrors:
    """Errors as OpenAI's SDKs read them: they choose an exception by the status."""

    content_type = JSON
    body_type = ErrorBody

    def status(self, error: TercetError) -> int:
        if isinstance(error, UnknownModel):
            return 404
        return 400 if isinstance(error, InvalidRequest) else error.status

    def body(self, error: TercetError, request_id: str) -> bytes:
        return _encode(self._render(error)) + b"\n"

    def event(self, error: TercetError, request_id: str) -> bytes:
        return sse.event(None, self._render(error))

    def _render(self, error: TercetError) -> ErrorBody:
        kind, code = self._kind_and_code(error)
        param = error.fields[0].field if error.fields else None
        return ErrorBody(error=ErrorObject(message=error.detail, type=kind, param=param, code=code))

    def _kind_and_code(self, error: TercetError) -> tuple[str, str]:
        match error:
            case UnknownModel():
                return "invalid_request_error", "model_not_found"
            case PromptTooLong():
                return "invalid_request_error", "context_length_exceeded"
            case Unauthorized():
                return "authentication_error", "invalid_api_key"
            case QuotaExceeded():
                return "rate_limit_error", "rate_limit_exceeded"
        return "server_error" if error.status >= 500 else "invalid_request_error", error.code


OPENAI_ERRORS: ErrorFormat = OpenAIErrors()
# What of OpenAI's API is served, for an unknown path below its routes.
PREFIX = "/v1/"
SERVED = (
    "of OpenAI's API there are POST /v1/completions, GET /v1/models and GET /v1/models/{model}. GPT-2 completes texts:"
    " send a chat's messages as one prompt."
)


def branch_error(failures: list[BranchFailure]) -> TercetError:
    """The error of a request without a completion for each of its choices."""
    if any(failure.code == PromptTooLong.code for failure in failures):
        return PromptTooLong(
            "prompt and max_tokens together have more tokens than the model's context; shorten the prompt, or leave"
            " echo out: the beginning of a long text is dropped then.",
            fields=(FieldError("prompt", "is too long"),),
        )
    return no_completion_error(failures, faster="send fewer prompts, a lower max_tokens or a longer max_time")
