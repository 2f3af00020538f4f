"""Jobs in a DynamoDB table, with conditional writes. The table is created at the first use if it does not exist.

A job is an item `job:<id>` with an attribute for each field that is not at its default; an item `idempotency:<digest>`
holds the id of the job that was sent with that key. The global index `due` lists jobs by queue and `due_at`. DynamoDB
updates it shortly after a write, so what it lists is read again, consistently, and leased by a conditional write.

`erase_at`, in whole seconds, is for a table with time to live: DynamoDB then erases expired jobs also while no gateway
runs, each item in its own time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import msgspec

from gateway.jobs.store import REMEMBERED_S, DamagedRecord, Job, Queue, decode_record, log_damaged
from shared.errors import JobsUnavailable

CONNECT_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 5.0
MAX_TRIES = 3
INDEX = "due"
# Error codes of a write whose condition was not met, or that another write overtook; of a transaction, its reasons.
_REFUSALS = {"ConditionalCheckFailedException", "TransactionConflictException"}
_REFUSAL_REASONS = {"None", "ConditionalCheckFailed", "TransactionConflict"}
_ABSENT = {"ConditionExpression": "attribute_not_exists(pk)"}


# A session is not thread-safe; the clients that it creates are.
_creating = threading.Lock()


class DynamoDbStore:
    """A `JobStore`. Credentials are found as boto3 finds them: environment, profile, role of the machine."""

    # An item holds 400 KB, names of attributes included.
    max_bytes: int | None = 390_000

    def __init__(self, table: str, *, region: str | None = None, endpoint: str | None = None) -> None:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        self._table = table
        self._client_error = ClientError
        self._errors = (BotoCoreError, ClientError)
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": MAX_TRIES},
        )
        self._arguments = {"region_name": region, "endpoint_url": endpoint, "config": config}
        self._client: Any = None
        self._epoch = time.time() - time.monotonic()

    def now(self) -> float:
        if self._client is None:
            with self._connected():  # its answer says the time
                pass
        return time.monotonic() + self._epoch

    def insert(self, job: Job) -> bool:
        put: dict[str, Any] = {"TableName": self._table, "Item": item_of(job), **_ABSENT}
        if not job.idempotency:
            return self._write(lambda client: client.put_item(**put))
        item = {**_key(f"idempotency:{job.idempotency}"), "job": {"S": job.id}, "erase_at": {"N": _longest_life(job)}}
        idempotent = {"TableName": self._table, "Item": item, **_ABSENT}
        return self._transact([{"Put": put}, {"Put": idempotent}])

    def read(self, job_id: str) -> Job | None:
        item = self._get(f"job:{job_id}")
        if item is None or "queue" not in item:  # it was set aside
            return None
        try:
            job = job_of(item)
            if job.queue != item["queue"].get("S"):
                raise DamagedRecord
        except DamagedRecord:
            self._set_aside(job_id, item["queue"])
            return None
        return job

    def find_idempotent(self, idempotency: str) -> str | None:
        pk = f"idempotency:{idempotency}"
        if (item := self._get(pk)) is None:
            return None
        job_id = str(next(iter(item.get("job", {"S": ""}).values())))
        # Its time to live has ended before that of this item, or it was set aside.
        if "queue" not in (self._get(f"job:{job_id}") or {}):
            self._write(
                lambda client: client.delete_item(
                    TableName=self._table,
                    Key=_key(pk),
                    ConditionExpression="job = :job",
                    ExpressionAttributeValues={":job": item.get("job", {"S": ""})},
                )
            )
            return None
        return job_id

    def replace(self, old: Job, new: Job) -> bool:
        put: dict[str, Any] = {"TableName": self._table, "Item": item_of(new), **_same_version(old)}
        if old.idempotency == new.idempotency:
            return self._write(lambda client: client.put_item(**put))
        return self._transact([{"Put": put}, self._without_idempotency(old)])

    def delete(self, job: Job) -> bool:
        removal: dict[str, Any] = {"TableName": self._table, "Key": _key(f"job:{job.id}"), **_same_version(job)}
        if not job.idempotency:
            return self._write(lambda client: client.delete_item(**removal))
        return self._transact([{"Delete": removal}, self._without_idempotency(job)])

    def due(self, queue: Queue, until: float, limit: int) -> list[str]:
        with self._connected() as client:
            found = client.query(
                TableName=self._table,
                IndexName=INDEX,
                Limit=limit,
                KeyConditionExpression="queue = :queue AND due_at <= :until",
                ExpressionAttributeValues={":queue": {"S": queue}, ":until": {"N": repr(until)}},
            )
        return [item["pk"]["S"].removeprefix("job:") for item in found["Items"]]

    def num_open(self, owner: str | None = None) -> int:
        query: dict[str, Any] = {
            "TableName": self._table,
            "IndexName": INDEX,
            "Select": "COUNT",
            "KeyConditionExpression": "queue = :queue",
            "ExpressionAttributeValues": {":queue": {"S": "open"}},
        }
        if owner is not None:
            query["FilterExpression"] = "#owner = :owner"
            query["ExpressionAttributeNames"] = {"#owner": "owner"}
            query["ExpressionAttributeValues"][":owner"] = {"S": owner}
        with self._connected() as client:
            return sum(page["Count"] for page in client.get_paginator("query").paginate(**query))

    def close(self) -> None:
        with _creating:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _set_aside(self, job_id: str, queue: dict[str, Any]) -> None:
        """Take a damaged item out of the index. Time to live erases it."""
        if self._write(
            lambda client: client.update_item(
                TableName=self._table,
                Key=_key(f"job:{job_id}"),
                UpdateExpression="REMOVE queue SET erase_at = :erase_at",
                ConditionExpression="queue = :queue",
                ExpressionAttributeValues={
                    ":queue": queue,
                    ":erase_at": {"N": str(math.ceil(self.now() + REMEMBERED_S))},
                },
            )
        ):
            log_damaged(job_id)

    def _note_call(self, context: dict[str, Any], **_: Any) -> None:
        context["tercet_called_at"] = time.monotonic()

    def _note_answer(self, http_response: Any, context: dict[str, Any], **_: Any) -> None:
        """Correct the clock as little as an answer demands: its `Date`, cut to seconds, is between call and answer."""
        with suppress(TypeError, ValueError):
            date = parsedate_to_datetime(http_response.headers.get("date")).timestamp()
            self._epoch = min(self._epoch, date + 1.0 - context["tercet_called_at"])
            self._epoch = max(self._epoch, date - time.monotonic())

    def _get(self, key: str) -> dict[str, Any] | None:
        with self._connected() as client:
            item: dict[str, Any] | None = client.get_item(
                TableName=self._table, Key=_key(key), ConsistentRead=True
            ).get("Item")
        return item

    def _without_idempotency(self, job: Job) -> dict[str, Any]:
        return {"Delete": {"TableName": self._table, "Key": _key(f"idempotency:{job.idempotency}")}}

    def _transact(self, actions: list[dict[str, Any]]) -> bool:
        return self._write(lambda client: client.transact_write_items(TransactItems=actions))

    def _write(self, write: Any) -> bool:
        """False: the condition of the write was not met, or another write of the same item was faster."""
        with self._connected() as client:
            try:
                write(client)
            except self._client_error as error:
                if not _is_refusal(error.response):
                    raise
                return False
        return True

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        try:
            with _creating:
                if self._client is None:
                    client = _session().client("dynamodb", **self._arguments)
                    client.meta.events.register("before-call.dynamodb", self._note_call)
                    client.meta.events.register("after-call.dynamodb", self._note_answer)
                    self._create_table(client)
                    self._client = client
            yield self._client
        except self._errors as error:
            raise JobsUnavailable("The job store (DynamoDB) cannot be used.") from error

    def _create_table(self, client: Any) -> None:
        try:
            client.describe_table(TableName=self._table)
        except client.exceptions.ResourceNotFoundException:
            with suppress(client.exceptions.ResourceInUseException):  # another gateway was faster
                client.create_table(**_table(self._table))
        client.get_waiter("table_exists").wait(TableName=self._table, WaiterConfig={"Delay": 1, "MaxAttempts": 30})


@cache
def _session() -> Any:
    """Return the session of this process: the descriptions of services that it loads take 0.2 s."""
    import boto3

    return boto3.session.Session()


def _table(name: str) -> dict[str, Any]:
    return {
        "TableName": name,
        "BillingMode": "PAY_PER_REQUEST",
        "AttributeDefinitions": [
            {"AttributeName": "pk", "AttributeType": "S"},
            {"AttributeName": "queue", "AttributeType": "S"},
            {"AttributeName": "due_at", "AttributeType": "N"},
        ],
        "KeySchema": [{"AttributeName": "pk", "KeyType": "HASH"}],
        "GlobalSecondaryIndexes": [
            {
                "IndexName": INDEX,
                "KeySchema": [
                    {"AttributeName": "queue", "KeyType": "HASH"},
                    {"AttributeName": "due_at", "KeyType": "RANGE"},
                ],
                "Projection": {"ProjectionType": "INCLUDE", "NonKeyAttributes": ["owner"]},
            }
        ],
    }


def _is_refusal(response: dict[str, Any]) -> bool:
    if response["Error"]["Code"] == "TransactionCanceledException":
        return {reason["Code"] for reason in response["CancellationReasons"]} <= _REFUSAL_REASONS
    return response["Error"]["Code"] in _REFUSALS


def _key(pk: str) -> dict[str, Any]:
    return {"pk": {"S": pk}}


def _same_version(job: Job) -> dict[str, Any]:
    return {
        "ConditionExpression": "version = :version",
        "ExpressionAttributeValues": {":version": {"N": str(job.version)}},
    }


def item_of(job: Job) -> dict[str, Any]:
    """A job as DynamoDB has it: numbers N, bytes B, all else S."""
    fields = msgspec.structs.asdict(job)
    job_id = fields.pop("id")
    defaults = {field.name: field.default for field in msgspec.structs.fields(Job)}
    present = {name: _value(value) for name, value in fields.items() if value != defaults[name] or name == "version"}
    return {**_key(f"job:{job_id}"), **present, "queue": {"S": job.queue}, "erase_at": {"N": _erase_at(job)}}


def job_of(item: dict[str, Any]) -> Job:
    """
    Raises:
        DamagedRecord: it is not a job.
    """
    job_id = item["pk"]["S"].removeprefix("job:")
    if "data" in item:  # of an earlier gateway, which wrote the whole job into one attribute
        return decode_record(item["data"].get("B"), id=job_id)
    try:
        fields = {name: next(iter(item[name].values())) for name in _FIELDS if name in item}
        return msgspec.convert({**fields, "id": job_id}, Job, strict=False)
    except (msgspec.MsgspecError, TypeError, ValueError, StopIteration) as error:
        raise DamagedRecord from error


_FIELDS = tuple(field.name for field in msgspec.structs.fields(Job))


def _value(value: str | float | bytes) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"B": value}
    return {"S": value} if isinstance(value, str) else {"N": repr(value)}


def _erase_at(job: Job) -> str:
    # An open job may be running at its expiry.
    until = {"open": job.expires_at + REMEMBERED_S, "final": job.expires_at, "expired": job.due_at}[job.queue]
    return str(math.ceil(until))


def _longest_life(job: Job) -> str:
    """When a new job is erased at the latest: it may end just before its expiry, and is kept as long again then."""
    return str(math.ceil(2 * job.expires_at - job.created_at + REMEMBERED_S))
