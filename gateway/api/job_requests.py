"""What `POST /jobs` takes: how its body is read, and how a job holds it.

Knows no HTTP server: the function in front of a sleeping instance (deploy/cloud/aws/wake) reads requests with it, too.
"""

from __future__ import annotations

import msgspec

from gateway.api.schema import (
    JOB_ALIASES,
    OTHERS_NAMES,
    AutocompleteRequest,
    JobRequest,
    parse_job_request,
    parse_others_job_request,
)
from gateway.api.tolerance import Tolerated
from shared.errors import invalid_field
from shared.parsing import members_of, replace_lone_surrogates

MAX_KEY_CHARS = 255
_encode = msgspec.json.Encoder().encode


def parse_job(body: bytes) -> Tolerated[JobRequest]:
    """
    Raises:
        InvalidJson, InvalidRequest: the request is wrong. Of a body with another deployment's names, unknown fields are
            ignored, with warnings.
    """
    if members_of(replace_lone_surrogates(body)).keys() & OTHERS_NAMES:
        return parse_others_job_request(body)
    return Tolerated(parse_job_request(body), [], 0)


def stored_request(request: JobRequest | AutocompleteRequest, body: bytes) -> bytes:
    """The fields that a client has sent, under their own names, sorted: equal requests are equal bytes.

    A gateway of another version has fields in another order, and does not know all defaults; it computes this, too.

    Args:
        request: what the body was parsed into.
    """
    members = members_of(replace_lone_surrogates(body))
    sent = {JOB_ALIASES.get(name, name) for name, value in members.items() if bytes(value) != b"null"}
    return _encode({name: getattr(request, name) for name in sorted(JobRequest.__struct_fields__) if name in sent})


def check_idempotency_key(key: str | None) -> str | None:
    """The value of the header `Idempotency-Key`.

    Raises:
        InvalidRequest: it cannot be used.
    """
    if key is not None and (not 0 < len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable())):
        raise invalid_field("Idempotency-Key", f"must have 1 to {MAX_KEY_CHARS} printable ASCII characters")
    return key
