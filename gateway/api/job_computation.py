"""Computes the answer to a job: that of `POST /autocomplete`. Knows no HTTP, and not when or where jobs run."""

from __future__ import annotations

import time

import msgspec

from gateway.api.autocompletion import Autocompletion
from gateway.api.schema import parse_autocomplete_request
from gateway.generation.request import Caller
from gateway.generation.request_starter import RequestStarter
from gateway.jobs.store import Job
from shared.cancellation import Cancelling

_encode = msgspec.json.Encoder().encode


def compute_job(starter: RequestStarter, autocompletion: Autocompletion, job: Job, cancelling: Cancelling) -> bytes:
    """Return the answer, as JSON.

    Raises:
        TercetError: as `AutocompleteResource.respond`.
    """
    # Its queue bounds a key's jobs; the key's concurrency is left to requests that wait.
    caller = Caller(request_id=job.id, owner=job.owner, max_concurrency=0, cancelling=cancelling, is_job=True)
    started_at = time.monotonic()
    request = parse_autocomplete_request(job.request)
    with (
        starter.counting(caller),
        autocompletion.started(caller, request, started_at) as started,
    ):
        result = started.result()
    return _encode(autocompletion.response(started.context.spec, result, started_at))
