"""The items of jobs in DynamoDB: what earlier gateways wrote, and what DynamoDB erases by itself."""

from __future__ import annotations

import pytest

from gateway.jobs.dynamodb import item_of, job_of
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from gateway.jobs.store import REMEMBERED_S, Job, encode_job, expire, finish, lease
from tests.gateway.jobs.servers import dynamodb_table

JOB = Job(
    id="a" * 24,
    owner="o",
    state="queued",
    created_at=1.25,
    due_at=1_700_000_000.123457,
    expires_at=3601.25,
    request=b"\x00{}",
    idempotency="i",
    fingerprint="f",
)


@pytest.mark.parametrize(
    "job", [JOB, lease(JOB, "token", 2.5, 6.0), finish(JOB, "succeeded", 3.5, 60.0, b"[]"), expire(JOB, 4.5)]
)
def test_a_job_is_an_attribute_for_each_field(job: Job) -> None:
    item = item_of(job)
    assert job_of(item) == job
    assert "error" not in item
    assert item["queue"] == {"S": job.queue}


def test_jobs_of_an_earlier_gateway_are_read() -> None:
    item = {"pk": {"S": f"job:{JOB.id}"}, "version": {"N": "1"}, "data": {"B": encode_job(JOB)}}
    assert job_of(item) == JOB


def test_dynamodb_erases_a_job_when_it_has_expired_but_none_that_may_run() -> None:
    def erased_at(job: Job) -> int:
        return int(item_of(job)["erase_at"]["N"])

    assert erased_at(JOB) == 3602 + REMEMBERED_S
    assert erased_at(finish(JOB, "succeeded", 3.5, 60.0)) == 64
    assert erased_at(expire(JOB, 4.5)) == 5 + REMEMBERED_S


@pytest.mark.integration
def test_a_key_whose_job_dynamodb_has_erased_can_be_used_again(dynamodb_endpoint: str) -> None:
    """DynamoDB erases each item by itself, so the item of the key may be left."""
    url = f"dynamodb://jobs-erased?region=eu-central-1&endpoint={dynamodb_endpoint}"
    queue = JobQueue(open_store(url), ttl_s=3600.0, max_open=10)
    first, _ = queue.submit("o", b"{}", "key")
    with dynamodb_table(url) as (client, table):
        client.delete_item(TableName=table, Key={"pk": {"S": f"job:{first.id}"}})
    second, is_new = queue.submit("o", b"[]", "key")
    assert is_new
    assert queue.submit("o", b"[]", "key") == (second, False)
    queue.close()
