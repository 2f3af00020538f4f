"""Who sent an HTTP request, as generation sees it."""

from __future__ import annotations

import falcon

from gateway.generation.runner import Caller


def caller_of(req: falcon.Request) -> Caller:
    """The caller of a request whose middleware has run."""
    context = req.context
    return Caller(
        request_id=context.id,
        owner=context.owner,
        max_concurrency=context.key.concurrency if context.key else None,
        session=context.session,
        sock=req.env.get("gunicorn.socket"),
        traceparent=req.context.traceparent,
    )
