"""Jobs in the DynamoDB table that the gateways use: adds them, reads them, says whether any is open.

The items are those of `gateway.jobs.dynamodb`, and a new job is what `gateway.jobs.queue.JobQueue.submit` adds; tests
compare both. Jobs are leased, run, cancelled and expired by gateways only.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import time
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from deploy.aws.wake.answers import Refusal, invalid

# As `DynamoDbStore.max_bytes`, less room for what is not the request.
MAX_REQUEST_BYTES = 389_000
REMEMBERED_S = 86_400.0
OWNER_SHARE = 0.25
MAX_KEY_CHARS = 255
_ID_BYTES = 18
_ID_CHARS = 24
# Another insert of the same key may be faster, and may be erased at once.
_MAX_TRIES = 4
_REFUSAL_REASONS = {"None", "ConditionalCheckFailed", "TransactionConflict"}
_ABSENT = {"ConditionExpression": "attribute_not_exists(pk)"}


@dataclass(frozen=True, slots=True)
class Job:
    """What a client may know of a job, and when it is due. Times are in seconds since the epoch."""

    id: str
    state: str
    created_at: float
    due_at: float
    expires_at: float
    started_at: float | None
    finished_at: float | None
    result: bytes
    error: bytes

    @property
    def is_open(self) -> bool:
        return self.state in {"queued", "running"}


class Jobs:
    """The table. Raises botocore's errors where it cannot be used."""

    def __init__(self, client: Any, table: str, *, ttl_s: float, max_open: int) -> None:
        """
        Args:
            client: boto3's, of DynamoDB.
            ttl_s, max_open: as TERCET_JOB_TTL_S and TERCET_JOB_QUEUE of the gateway.
        """
        self._client = client
        self._table = table
        self._ttl_s = ttl_s
        self._max_open = max_open

    def submit(self, owner: str, request: bytes, key: str | None) -> Job:
        """Add a job, unless its owner has sent this request with this key before: then that job.

        Raises:
            Refusal: the queue or the owner's share is full, the request is too large, or the key was used for another.
        """
        if len(request) > MAX_REQUEST_BYTES:
            raise Refusal(
                413,
                "body_too_large",
                "Body too large",
                f"The job store takes at most {MAX_REQUEST_BYTES} bytes; shorten the prompt.",
            )
        digest, fingerprint = _idempotency(owner, request, key)
        for _ in range(_MAX_TRIES):
            if digest and (known := self._find_idempotent(digest)) is not None:
                job, its_fingerprint = known
                if not hmac.compare_digest(its_fingerprint, fingerprint):
                    raise invalid(
                        "Idempotency-Key", "was sent before with another request; send a new one with each new request"
                    )
                return job
            self._check_bounds(owner)
            item = self._new_item(owner, request, digest, fingerprint)
            # Where boto3 repeated an insert whose confirmation was lost, the job is there.
            if self._insert(item) or self._get(item["pk"]["S"]) is not None:
                return _job(item)
        raise Refusal(
            503, "jobs_unavailable", "Jobs unavailable", "Another request with this Idempotency-Key is being stored."
        )

    def find(self, job_id: str, owner: str) -> Job:
        """
        Raises:
            Refusal: there is no such job, it is another owner's, or it has expired.
        """
        item = self._get(f"job:{job_id}") if len(job_id) == _ID_CHARS else None
        if item is None or item["owner"]["S"] != owner:
            raise Refusal(404, "unknown_job", "Unknown job", "No job with this id is known here.")
        if _is_expired(job := _job(item)):
            self._expire(item)
            raise Refusal(
                410,
                "job_expired",
                "Job expired",
                "The job has expired: its request and its result are erased. Send it again.",
            )
        return job

    def has_open(self) -> bool:
        """Whether a job is queued or running, as of a moment ago: the index is updated shortly after a write."""
        return bool(self._open_owners(1))

    def _open_owners(self, limit: int) -> list[str]:
        """The owners of up to `limit` jobs that are queued or running."""
        owners: list[str] = []
        pages = self._client.get_paginator("query").paginate(
            TableName=self._table,
            IndexName="due",
            ProjectionExpression="#owner",
            ExpressionAttributeNames={"#owner": "owner"},
            KeyConditionExpression="queue = :queue",
            ExpressionAttributeValues={":queue": {"S": "open"}},
            PaginationConfig={"MaxItems": limit},
        )
        for page in pages:
            owners += (item["owner"]["S"] for item in page["Items"])
        return owners

    def _check_bounds(self, owner: str) -> None:
        owners = self._open_owners(self._max_open)
        max_owned = max(1, int(OWNER_SHARE * self._max_open))
        if owners.count(owner) >= max_owned:
            raise Refusal(
                429,
                "quota_exceeded",
                "Quota exceeded",
                f"{max_owned} of your jobs are queued or running. Wait for one of them to end.",
            )
        if len(owners) >= self._max_open:
            raise Refusal(
                503,
                "overloaded",
                "Overloaded",
                f"The job queue is full: at most {self._max_open} jobs may be queued or running. Try again later.",
            )

    def _find_idempotent(self, digest: str) -> tuple[Job, str] | None:
        """The job that was sent with this key, unless it has expired, and its fingerprint."""
        pk = f"idempotency:{digest}"
        if (item := self._get(pk)) is None:
            return None
        found = self._get(f"job:{item['job']['S']}")
        if found is not None and not _is_expired(job := _job(found)):
            return job, found["fingerprint"]["S"]
        if found is not None:
            self._expire(found)
            return None
        # DynamoDB erases each item in its own time, so the job may be gone before the item of its key.
        self._refusable(
            lambda: self._client.delete_item(
                TableName=self._table,
                Key={"pk": {"S": pk}},
                ConditionExpression="job = :job",
                ExpressionAttributeValues={":job": item["job"]},
            )
        )
        return None

    def _new_item(self, owner: str, request: bytes, digest: str, fingerprint: str) -> dict[str, Any]:
        now = time.time()
        expires_at = now + self._ttl_s
        item = {
            "pk": {"S": f"job:{secrets.token_urlsafe(_ID_BYTES)}"},
            "version": {"N": "1"},
            "owner": {"S": owner},
            "state": {"S": "queued"},
            "queue": {"S": "open"},
            "request": {"B": request},
            "created_at": {"N": repr(now)},
            "due_at": {"N": repr(now)},
            "expires_at": {"N": repr(expires_at)},
            "erase_at": {"N": str(math.ceil(expires_at + REMEMBERED_S))},
        }
        return item | ({"idempotency": {"S": digest}, "fingerprint": {"S": fingerprint}} if digest else {})

    def _insert(self, item: dict[str, Any]) -> bool:
        """False: its id or its idempotency key exists."""
        put = {"TableName": self._table, "Item": item, **_ABSENT}
        if "idempotency" not in item:
            return self._refusable(lambda: self._client.put_item(**put))
        idempotent = {
            "pk": {"S": f"idempotency:{item['idempotency']['S']}"},
            "job": {"S": item["pk"]["S"].removeprefix("job:")},
            # The longest life of a job: it may end just before its expiry, and is kept as long again then.
            "erase_at": {"N": str(math.ceil(float(item["expires_at"]["N"]) + self._ttl_s + REMEMBERED_S))},
        }
        actions = [{"Put": put}, {"Put": {"TableName": self._table, "Item": idempotent, **_ABSENT}}]
        return self._refusable(lambda: self._client.transact_write_items(TransactItems=actions))

    def _expire(self, item: dict[str, Any]) -> None:
        """Erase request and result, and free the key, as `gateway.jobs.store.expire` does; unless it has changed."""
        if item["state"]["S"] == "expired":
            return
        due_at = time.time() + REMEMBERED_S
        kept = {name: item[name] for name in ("pk", "owner", "created_at", "expires_at")}
        remains = {
            **kept,
            "state": {"S": "expired"},
            "queue": {"S": "expired"},
            "due_at": {"N": repr(due_at)},
            "version": {"N": str(int(item["version"]["N"]) + 1)},
            "erase_at": {"N": str(math.ceil(due_at))},
        }
        put = {
            "TableName": self._table,
            "Item": remains,
            "ConditionExpression": "version = :version",
            "ExpressionAttributeValues": {":version": item["version"]},
        }
        if "idempotency" not in item:
            self._refusable(lambda: self._client.put_item(**put))
            return
        key = {"pk": {"S": f"idempotency:{item['idempotency']['S']}"}}
        actions = [{"Put": put}, {"Delete": {"TableName": self._table, "Key": key}}]
        self._refusable(lambda: self._client.transact_write_items(TransactItems=actions))

    def _refusable(self, write: Any) -> bool:
        """False: the condition of the write was not met, or another write of the same item was faster."""
        try:
            write()
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in {"ConditionalCheckFailedException", "TransactionConflictException"}:
                return False
            if code == "TransactionCanceledException":
                reasons: Any = error.response.get("CancellationReasons", [{"Code": "unknown"}])
                if {reason["Code"] for reason in reasons} <= _REFUSAL_REASONS:
                    return False
            raise
        return True

    def _get(self, pk: str) -> dict[str, Any] | None:
        answer = self._client.get_item(TableName=self._table, Key={"pk": {"S": pk}}, ConsistentRead=True)
        item: dict[str, Any] | None = answer.get("Item")
        return item


def _job(item: dict[str, Any]) -> Job:
    def number(name: str) -> float | None:
        return float(item[name]["N"]) if name in item else None

    def content(name: str) -> bytes:
        return bytes(item[name]["B"]) if name in item else b""

    return Job(
        id=item["pk"]["S"].removeprefix("job:"),
        state=item["state"]["S"],
        created_at=float(item["created_at"]["N"]),
        due_at=float(item["due_at"]["N"]),
        expires_at=float(item["expires_at"]["N"]),
        started_at=number("started_at"),
        finished_at=number("finished_at"),
        result=content("result"),
        error=content("error"),
    )


def _is_expired(job: Job) -> bool:
    now = time.time()
    return job.state == "expired" or (job.expires_at <= now and not (job.state == "running" and now < job.due_at))


def _idempotency(owner: str, request: bytes, key: str | None) -> tuple[str, str]:
    """A digest of owner and key, and one of the request that reveals nothing of it without the key.

    Raises:
        Refusal: the key cannot be used.
    """
    if key is None:
        return "", ""
    if not 0 < len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        raise invalid("Idempotency-Key", f"must have 1 to {MAX_KEY_CHARS} printable ASCII characters")
    return (
        hashlib.sha256(json.dumps([owner, key], separators=(",", ":")).encode()).hexdigest(),
        hmac.new(key.encode(), request, hashlib.sha256).hexdigest(),
    )
