"""Lambda's entry: answers `POST /jobs` and `GET /jobs/{id}` of an HTTP API, and sweeps on EventBridge's events.

A sweep starts the instance if a job is open. One follows each stop of the instance, because a job may have been stored
while it was stopping, and one each minute, because anything else may have failed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from deploy.cloud.aws.wake.instance import Wake, log, wake_instance
from gateway.api.job_requests import check_idempotency_key, parse_job, stored_request
from gateway.jobs.dynamodb import DynamoDbStore
from gateway.jobs.queue import JobQueue
from gateway.jobs.store import Job
from shared.errors import PROBLEM_JSON, JobsUnavailable, NotFound, TercetError, Unauthorized

# Part of the function's time that is kept for the answer.
MARGIN_S = 1.5
# After which a job that is still queued is a reason to look after the instance.
PATIENCE_S = 5.0
POLL_S = 0.25
RETRY_AFTER_S = "1"
_WAIT = re.compile(r'(?:^|,)\s*wait\s*=\s*"?([0-9]+(?:\.[0-9]+)?)"?\s*(?:[,;]|$)', re.IGNORECASE)
# The owner of all jobs where requests are not signed. No principal has this name.
PUBLIC = "public"
Answer = dict[str, Any]  # in the form of an HTTP API (payload 2.0)
CONFIG = Config(connect_timeout=1, read_timeout=3, retries={"mode": "standard", "total_max_attempts": 4})


class SweepFailed(Exception):
    """A job is open and the instance could not be started. Lambda counts it as an error, and tries again."""


@dataclass(frozen=True, slots=True)
class Service:
    """
    Attributes:
        wake: starts the instance if it can be started now.
        max_wait_s: the longest time that a client may let it wait for a result.
        is_public: requests are not signed; a client that knows a job's id may read it.
    """

    jobs: JobQueue
    wake: Callable[[], Wake]
    max_wait_s: float
    is_public: bool

    def respond(self, event: dict[str, Any], until: float) -> Answer:
        """
        Args:
            event: a request to an HTTP API, payload 2.0.
            until: `time.monotonic()` time by which the answer must be ready.
        """
        try:
            owner = PUBLIC if self.is_public else _owner(event)
            route = event["routeKey"]
            if route == "POST /jobs":
                return self._submit(event, owner, until)
            if route == "GET /jobs/{id}":
                return self._read(event["pathParameters"]["id"], owner)
            raise NotFound("Known are POST /jobs and GET /jobs/{id}.")
        except TercetError as error:
            if isinstance(error, JobsUnavailable):
                log("job_store_failed", reason=_reason(error))
            return _problem(error)
        except Exception as error:  # noqa: BLE001 - a client gets JSON whatever happens, and the log no prompt
            log("unhandled_exception", reason=type(error).__name__, frames=traceback.format_tb(error.__traceback__))
            return _problem(TercetError("The request failed for an unknown reason."))

    def sweep(self) -> dict[str, object]:
        """Start the instance if a job is open.

        Raises:
            SweepFailed: it could not be started.
        """
        if not self.jobs.num_open():
            return {"open": False}
        wake = self.wake()
        if not wake.is_up:
            raise SweepFailed(f"a job is open, and the instance is {wake.state or 'unknown'} ({wake.code})")
        return {"open": True, "instance": wake.state}

    def _submit(self, event: dict[str, Any], owner: str, until: float) -> Answer:
        body = event.get("body") or ""
        raw = base64.b64decode(body) if event.get("isBase64Encoded") else body.encode("utf-8", "surrogatepass")
        headers = event.get("headers", {})
        wait_until = min(until, time.monotonic() + min(_wait_s(headers.get("prefer", "")), self.max_wait_s))
        key = check_idempotency_key(headers.get("idempotency-key"))
        parsed = parse_job(raw)
        job, _ = self.jobs.submit(owner, stored_request(parsed.request, raw), key)
        log("job_queued", job=job.id[:8], bytes=len(raw))
        wake = self.wake() if job.queue == "open" else None
        while job.queue == "open" and time.monotonic() + POLL_S < wait_until:
            time.sleep(POLL_S)
            job = self.jobs.find(job.id, owner)
        return _render(job, wake, 202 if job.queue == "open" else 200, parsed.warnings)

    def _read(self, job_id: str, owner: str) -> Answer:
        job = self.jobs.find(job_id, owner)
        wake = None
        # Also a running job whose lease has ended: its runner is gone.
        if job.queue == "open" and time.time() - job.due_at > PATIENCE_S:
            wake = self.wake()
        return _render(job, wake, 200)


def handle(event: dict[str, Any], context: Any) -> dict[str, Any]:
    service = make_service()
    if "http" in event.get("requestContext", {}):
        return service.respond(event, time.monotonic() + context.get_remaining_time_in_millis() / 1e3 - MARGIN_S)
    return service.sweep()


@cache
def make_service() -> Service:
    """Read the environment that the template gives to the function."""
    environ = os.environ
    store = DynamoDbStore(environ["TABLE"])
    jobs = JobQueue(store, ttl_s=float(environ["JOB_TTL_S"]), max_open=int(environ["JOB_QUEUE"]))
    wake = partial(wake_instance, boto3.client("ec2", config=CONFIG), environ["INSTANCE_ID"])
    return Service(jobs, wake, float(environ["MAX_WAIT_S"]), is_public=environ.get("AUTHORIZATION") == "NONE")


def _owner(event: dict[str, Any]) -> str:
    """The IAM principal of the request, without the session of an assumed role: a job belongs to it.

    Raises:
        Unauthorized: the route has no IAM authorizer.
    """
    identity = event["requestContext"].get("authorizer", {}).get("iam", {}).get("userId") or ""
    if not identity:
        raise Unauthorized("Sign the request with AWS credentials (Signature 4).")
    return f"aws:{identity.partition(':')[0]}"


def _wait_s(prefer: str) -> float:
    """Seconds of `Prefer: wait=10` (RFC 7240); 0 where it is absent or no number."""
    match = _WAIT.search(prefer)
    return float(match[1]) if match else 0.0


def _render(job: Job, wake: Wake | None, status: int, warnings: Sequence[str] = ()) -> Answer:
    body: dict[str, object] = {
        "id": job.id,
        "state": job.state,
        "created_at": job.created_at,
        "expires_at": job.expires_at,
    }
    body |= {name: at for name in ("started_at", "finished_at") if (at := getattr(job, name)) is not None}
    body |= {name: json.loads(raw) for name in ("result", "error") if (raw := getattr(job, name))}
    if warnings:
        body["warnings"] = warnings
    if wake is not None:
        body["instance"] = {"state": wake.state or "unknown"} | ({"error": wake.code} if wake.code else {})
    headers = {"retry-after": RETRY_AFTER_S if wake is None or wake.is_up else "30"} if job.queue == "open" else {}
    if status == 202:
        headers["location"] = f"/jobs/{job.id}"
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")) + "\n"
    return _answer(status, text, {"content-type": "application/json", **headers})


def _problem(error: TercetError) -> Answer:
    headers = {name.lower(): value for name, value in error.headers.items()}
    return _answer(error.status, error.problem().decode(), {"content-type": PROBLEM_JSON, **headers})


def _answer(status: int, body: str, headers: dict[str, str]) -> Answer:
    return {"statusCode": status, "headers": {"cache-control": "no-store", **headers}, "body": body}


def _reason(error: JobsUnavailable) -> str:
    cause = error.__cause__
    return str(cause.response["Error"]["Code"]) if isinstance(cause, ClientError) else type(cause or error).__name__
