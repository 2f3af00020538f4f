"""`/jobs`: completions whose results are read by id, for clients that cannot wait. The answer is `/autocomplete`'s.

Translates between HTTP and the queue of jobs. Knows neither where jobs are stored nor when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import falcon
import msgspec
from msgspec import Raw, Struct

from gateway.api.callers import caller_of
from gateway.api.job_requests import check_idempotency_key, parse_job, stored_request
from gateway.api.operation import JSON, Answer, Operation, Operations, Parameter
from gateway.api.schema import AutocompleteRequest, AutocompleteResponse, parse_job_request
from gateway.generation.request import Caller
from gateway.jobs.executor import JobExecutor
from gateway.jobs.store import Job, JobState
from shared.errors import (
    BodyTooLarge,
    InvalidJson,
    InvalidRequest,
    JobExpired,
    JobsUnavailable,
    Overloaded,
    Problem,
    QuotaExceeded,
    TercetError,
    UnknownJob,
    UnknownModel,
    invalid_field,
)

# Seconds after which a client should ask again for a job that is not final.
RETRY_AFTER_S = 1
_encode = msgspec.json.Encoder().encode
CheckRequest = Callable[[AutocompleteRequest, Caller], None]


class JobResponse(Struct, kw_only=True, omit_defaults=True):
    """A job. Times are in seconds since the epoch.

    `result` is present if it succeeded: the answer of `POST /autocomplete`. `error` is present if it failed: problem
    details. Both are erased at `expires_at`. `warnings` of the answer to `POST` says which fields were ignored.
    """

    id: str
    state: JobState
    created_at: float
    expires_at: float
    started_at: float | None = None
    finished_at: float | None = None
    result: AutocompleteResponse | None = None
    error: Problem | None = None
    warnings: list[str] = []


_RETRY_AFTER = {"Retry-After": "While the job is not final: seconds after which to read it again."}
JOB_ACCEPTED = Answer(
    "The job is queued.", {JSON: JobResponse}, {**_RETRY_AFTER, "Location": "Path at which to read the job."}
)
JOB_HEADERS = (
    Parameter(
        "Prefer",
        "header",
        "`respond-async`: the answer is a job, 202, to be read at `/jobs/{job_id}`.",
    ),
    Parameter(
        "Idempotency-Key",
        "header",
        "For a job: the same key and the same request answer with the same job. 1 to 255 printable ASCII characters.",
    ),
)
_ID = Parameter("job_id", "path", "the id of a job")
ERRORS_OF_JOBS: tuple[type[TercetError], ...] = (JobsUnavailable,)


class JobSubmitter:
    """Makes a job of a request, and answers with the job."""

    def __init__(self, jobs: JobExecutor, prefix: str = "") -> None:
        """
        Args:
            prefix: the path of the public URL; `Location` begins with it.
        """
        self._jobs = jobs
        self._prefix = prefix

    def respond(
        self,
        req: falcon.Request,
        resp: falcon.Response,
        request: AutocompleteRequest,
        body: bytes,
        warnings: Sequence[str] = (),
    ) -> None:
        """
        Args:
            request: checked.
            body: what the request was parsed from.
            warnings: what of it was ignored.

        Raises:
            InvalidRequest: a job cannot have one of its fields, or its `Idempotency-Key` cannot be used.
            QuotaExceeded, Overloaded, BodyTooLarge, JobsUnavailable: as `JobQueue.submit`.
        """
        for field, is_set in (("stream", request.stream), ("session", request.session is not None)):
            if is_set:
                raise invalid_field(field, "cannot be used in a job: its client does not wait; leave it out")
        stored = stored_request(request, body)
        key = check_idempotency_key(req.get_header("Idempotency-Key"))
        job, is_new = self._jobs.queue.submit(req.context.owner, stored, key)
        if is_new:
            self._jobs.wake()
        _render(resp, job, warnings)
        if job.queue == "open":
            resp.status = falcon.HTTP_202
        resp.set_header("Location", f"{self._prefix}/jobs/{job.id}")
        req.context.log = {"job": job.id[:8], "context_chars": len(request.context)}


class JobsResource:
    """Answers `POST /jobs`."""

    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="Jobs",
            summary="Complete a text later",
            description="The answer is read at `/jobs/{job_id}`. A client that sends `Idempotency-Key` may repeat the"
            " request and gets the same job. Unknown fields are an error, unless the body has one of the names"
            " `prompt`, `num_samples` and `top_n` of another deployment: then they are ignored, with `warnings`, and a"
            " number may be in a string.",
            bodies=(parse_job_request,),
            examples={"two texts": {"prompt": "The old man looked at the sea and", "num_samples": 2, "length": 40}},
            parameters=JOB_HEADERS[1:],
            answers={202: JOB_ACCEPTED, 200: Answer("The job that this key has made is final.", {JSON: JobResponse})},
            errors=(
                InvalidJson,
                InvalidRequest,
                UnknownModel,
                QuotaExceeded,
                Overloaded,
                BodyTooLarge,
                JobsUnavailable,
            ),
        )
    }

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
        body = req.bounded_stream.read()
        parsed = parse_job(body)
        req.context.num_ignored = parsed.num_unknown
        request = AutocompleteRequest(**msgspec.structs.asdict(parsed.request))
        self._check(request, caller_of(req))
        self._submitter.respond(req, resp, request, body, parsed.warnings)


class JobResource:
    """Answers `GET` and `DELETE /jobs/{job_id}`. Another key's job is answered as an unknown one."""

    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag="Jobs",
            summary="Read a job",
            parameters=(_ID,),
            answers={200: Answer("The job, with its result if it succeeded.", {JSON: JobResponse})},
            errors=(UnknownJob, JobExpired, JobsUnavailable),
        ),
        "DELETE": Operation(
            tag="Jobs",
            summary="Cancel a job, or erase a final one",
            parameters=(_ID,),
            answers={204: Answer("It is cancelled, or erased.")},
            errors=(UnknownJob, JobExpired, JobsUnavailable),
        ),
    }

    def __init__(self, jobs: JobExecutor) -> None:
        self._jobs = jobs

    def on_get(self, req: falcon.Request, resp: falcon.Response, job_id: str) -> None:
        """
        Raises:
            UnknownJob, JobExpired, JobsUnavailable
        """
        _render(resp, self._jobs.queue.find(job_id, req.context.owner))

    def on_delete(self, req: falcon.Request, resp: falcon.Response, job_id: str) -> None:
        """Cancel a job that is queued or running; erase one that is final.

        Raises:
            UnknownJob, JobExpired, JobsUnavailable
        """
        job = self._jobs.queue.cancel_or_delete(job_id, req.context.owner)
        self._jobs.cancel(job.id)
        resp.status = falcon.HTTP_204


def _render(resp: falcon.Response, job: Job, warnings: Sequence[str] = ()) -> None:
    body = JobResponse(
        id=job.id,
        state=job.state,
        created_at=job.created_at,
        expires_at=job.expires_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        # Stored as they are sent.
        result=cast(AutocompleteResponse, Raw(job.result)) if job.result else None,
        error=cast(Problem, Raw(job.error.strip())) if job.error else None,
        warnings=list(warnings),
    )
    resp.content_type = JSON
    resp.data = _encode(body) + b"\n"
    resp.set_header("Cache-Control", "no-store")
    if job.queue == "open":
        resp.set_header("Retry-After", str(RETRY_AFTER_S))
