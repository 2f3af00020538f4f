"""`/jobs`: completions whose results are read by id, for clients that cannot wait. The answer is `/autocomplete`'s.

Translates between HTTP and the queue of jobs. Where jobs are stored and when they run is not known here.
"""

from __future__ import annotations

from collections.abc import Callable

import falcon
import msgspec
from msgspec import Raw, Struct

from gateway.api.callers import caller_of
from gateway.api.schema import ALIASES, AutocompleteRequest
from gateway.generation.runner import Caller
from gateway.jobs.runner import JobRunner
from gateway.jobs.store import Job, State
from shared.errors import FieldError, InvalidRequest
from shared.parsing import BodyParser

# Names of fields that clients of a published deployment with jobs send.
JOB_ALIASES = {**ALIASES, "prompt": "context", "num_samples": "n_samples", "top_n": "top_k"}
# Seconds after which a client should ask again for a job that is not final.
RETRY_AFTER_S = 1
MAX_KEY_CHARS = 255
parse_job_request = BodyParser(AutocompleteRequest, JOB_ALIASES)
_encode = msgspec.json.Encoder().encode
CheckRequest = Callable[[AutocompleteRequest, Caller], None]


class JobResponse(Struct, kw_only=True, omit_defaults=True):
    """A job. Times are in seconds since the epoch.

    `result` is present if it succeeded: the answer of `POST /autocomplete`. `error` is present if it failed: problem
    details. Both are erased at `expires_at`.
    """

    id: str
    state: State
    created_at: float
    expires_at: float
    started_at: float | None = None
    finished_at: float | None = None
    result: Raw | None = None
    error: Raw | None = None


class JobSubmitter:
    """Makes a job of a request, and answers with the job."""

    def __init__(self, jobs: JobRunner) -> None:
        self._jobs = jobs

    def respond(self, req: falcon.Request, resp: falcon.Response, request: AutocompleteRequest) -> None:
        """
        Args:
            request: checked.

        Raises:
            InvalidRequest: a job cannot have one of its fields, or its `Idempotency-Key` cannot be used.
            QuotaExceeded, Overloaded, BodyTooLarge, JobsUnavailable: as `JobQueue.submit`.
        """
        for field, is_set in (("stream", request.stream), ("session", request.session is not None)):
            if is_set:
                raise _invalid(field, "cannot be used in a job: its client does not wait; leave it out")
        job, is_new = self._jobs.queue.submit(req.context.owner, _encode(request), _idempotency_key(req))
        if is_new:
            self._jobs.wake()
        _render(resp, job)
        if job.queue == "open":
            resp.status = falcon.HTTP_202
        resp.set_header("Location", f"/jobs/{job.id}")
        req.context.log = {"job": job.id[:8], "context_chars": len(request.context)}


class JobsResource:
    """Answers `POST /jobs`."""

    def __init__(self, submitter: JobSubmitter, check: CheckRequest) -> None:
        """
        Args:
            check: raises what `/autocomplete` would raise for a request that is wrong.
        """
        self._submitter = submitter
        self._check = check

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidJson, InvalidRequest, UnknownModel: the request is wrong.
            TercetError: as `JobSubmitter.respond`.
        """
        request = parse_job_request(req.bounded_stream.read())
        self._check(request, caller_of(req))
        self._submitter.respond(req, resp, request)


class JobResource:
    """Answers `GET` and `DELETE /jobs/{job_id}`. Another key's job is answered as an unknown one."""

    def __init__(self, jobs: JobRunner) -> None:
        self._jobs = jobs

    def on_get(self, req: falcon.Request, resp: falcon.Response, job_id: str) -> None:
        """
        Raises:
            UnknownJob, JobExpired, JobsUnavailable
        """
        _render(resp, self._jobs.queue.find(job_id, req.context.owner))

    on_head = on_get

    def on_delete(self, req: falcon.Request, resp: falcon.Response, job_id: str) -> None:
        """Cancel a job that is queued or running; erase one that is final.

        Raises:
            UnknownJob, JobExpired, JobsUnavailable
        """
        job = self._jobs.queue.cancel_or_delete(job_id, req.context.owner)
        self._jobs.cancel(job.id)
        resp.status = falcon.HTTP_204


def prefers_async(req: falcon.Request) -> bool:
    """Whether the client asks for a job in place of an answer (RFC 7240)."""
    preferences = (req.get_header("Prefer") or "").split(",")
    return any(preference.partition(";")[0].strip().lower() == "respond-async" for preference in preferences)


def _render(resp: falcon.Response, job: Job) -> None:
    body = JobResponse(
        id=job.id, state=job.state, created_at=job.created_at, expires_at=job.expires_at,
        started_at=job.started_at, finished_at=job.finished_at,
        result=Raw(job.result) if job.result else None, error=Raw(job.error.strip()) if job.error else None,
    )  # fmt: skip
    resp.content_type = falcon.MEDIA_JSON
    resp.data = _encode(body) + b"\n"
    resp.set_header("Cache-Control", "no-store")
    if job.queue == "open":
        resp.set_header("Retry-After", str(RETRY_AFTER_S))


def _idempotency_key(req: falcon.Request) -> str | None:
    key = req.get_header("Idempotency-Key")
    if key is None:
        return None
    if not 0 < len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise _invalid("Idempotency-Key", f"must have 1 to {MAX_KEY_CHARS} printable ASCII characters")
    return key


def _invalid(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}.", fields=(FieldError(field, message),))
