"""What the head of an HTTP request says: who sent it, as generation sees it, and whether it asks for a job."""

from __future__ import annotations

from typing import Annotated

import falcon
from msgspec import Meta

from gateway.api.fields import MAX_SESSION_CHARS
from gateway.api.operation import Parameter
from gateway.generation.request import Caller
from shared.errors import invalid_field

SESSION_HEADER = "X-Session-Id"
SESSION_PARAMETER = Parameter(
    SESSION_HEADER,
    "header",
    f"The session, of up to {MAX_SESSION_CHARS} characters: a newer request of a session cancels the older one. A load"
    " balancer keeps requests with the same header on one gateway. A `session` in the body comes first.",
    Annotated[str, Meta(max_length=MAX_SESSION_CHARS)],
)


def caller_of(req: falcon.Request) -> Caller:
    """The caller of a request whose middleware has run.

    Raises:
        InvalidRequest: the session header is too long.
    """
    context = req.context
    return Caller(
        request_id=context.id,
        owner=context.owner or req.remote_addr,
        max_concurrency=context.key.concurrency if context.key else 0,
        session=context.session or _session(req),
        sock=req.env.get("gunicorn.socket"),
        traceparent=context.traceparent,
        charge=context.charge,
    )


def prefers_async(req: falcon.Request) -> bool:
    """Whether the client asks for a job in place of an answer (RFC 7240)."""
    preferences = (req.get_header("Prefer") or "").split(",")
    return any(preference.partition(";")[0].strip().lower() == "respond-async" for preference in preferences)


def _session(req: falcon.Request) -> str | None:
    session = req.get_header(SESSION_HEADER)
    if session and len(session) > MAX_SESSION_CHARS:
        raise invalid_field(SESSION_HEADER, f"must be a string of up to {MAX_SESSION_CHARS} characters")
    return session or None
