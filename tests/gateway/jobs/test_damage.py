"""Records that cannot be read: each costs its job, once, whatever is wrong with it. One suite over the three stores."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace
from redis import Redis
from structlog.testing import capture_logs

from gateway.jobs.queue import JobQueue
from gateway.jobs.store import REMEMBERED_S, Job, encode_job
from shared.errors import UnknownJob
from tests.gateway.jobs.conftest import Clock, MakeQueue
from tests.gateway.jobs.servers import dynamodb_table

# More than a lease or a purge looks at together.
NUM_DAMAGED = 20


# What stands in the place of a record.
DATA: dict[str, Callable[[Job], bytes]] = {
    "empty": lambda job: b"",
    "cut": lambda job: encode_job(job)[:-5],
    "longer": lambda job: encode_job(job) + b"\x00",
    "noise": lambda job: bytes(range(256)),
    "no map": lambda job: b"\x01",
    "other type": lambda job: encode_job(job).replace(b"queued", b"qu\xffued"),
    "deep": lambda job: b"\x91" * 100_000,
    "other version": lambda job: encode_job(replace(job, version=job.version + 7)),
    "other id": lambda job: encode_job(replace(job, id="A" * 24)),
}


class Damage:
    """Changes records of a store as no Tercet does."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.scheme = url.partition(":")[0]

    def replace_data(self, job: Job, data: bytes) -> None:
        if self.scheme == "sqlite":
            self.execute("UPDATE jobs SET data = ? WHERE id = ?", data, job.id)
        elif self.scheme == "redis":
            with Redis.from_url(self.url) as client:
                client.hset(f"{{tercet}}:job:{job.id}", "data", data)
        else:
            with dynamodb_table(self.url) as (client, table):
                client.update_item(
                    TableName=table,
                    Key={"pk": {"S": f"job:{job.id}"}},
                    UpdateExpression="SET #data = :value",
                    ExpressionAttributeNames={"#data": "data"},
                    ExpressionAttributeValues={":value": {"B": data}},
                )

    def execute(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.url.removeprefix("sqlite:"))) as connection, connection:
            connection.execute(statement, values)


@pytest.fixture
def damage(store_url: str) -> Damage:
    return Damage(store_url)


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as found:
        yield found


def damaged_ids(logs: list[Any]) -> list[str]:
    return sorted(entry["job"] for entry in logs if entry["event"] == "job_damaged")


def run_all(queue: JobQueue) -> set[str]:
    """Run what can be leased; the ids."""
    done = set()
    while (job := queue.lease()) is not None:
        assert queue.finish(job, "succeeded", result=b"1")
        done.add(job.id)
    return done


@pytest.mark.parametrize("form", DATA)
def test_damaged_jobs_cost_themselves_alone(
    queue: JobQueue, damage: Damage, clock: Clock, logs: list[Any], form: str
) -> None:
    damaged = [queue.submit("o", b"{}", f"key-{number}")[0] for number in range(3)]
    healthy = {queue.submit("o", b"{}")[0].id for _ in range(3)}
    if damage.scheme == "dynamodb" and form == "other version":  # it is no second copy there
        form = "empty"
    for job in damaged:
        damage.replace_data(job, DATA[form](job))
    assert run_all(queue) == healthy
    queue.purge()
    for job in damaged:
        for act in (queue.find, queue.cancel_or_delete):
            with pytest.raises(UnknownJob):
                act(job.id, "o")
    assert queue.num_open() == 0
    assert damaged_ids(logs) == sorted(job.id[:8] for job in damaged)
    # The key and the owner's share are free again.
    assert queue.submit("o", b"{}", "key-0")[1]
    clock.offset_s += REMEMBERED_S + 1
    queue.purge()


def test_many_damaged_jobs_hold_nothing_up(make_queue: MakeQueue, damage: Damage, logs: list[Any]) -> None:
    queue = make_queue(max_open=4 * (NUM_DAMAGED + 4))
    damaged = [queue.submit("o", b"{}")[0] for _ in range(NUM_DAMAGED)]
    healthy = queue.submit("o", b"{}")[0]
    for job in damaged:
        damage.replace_data(job, b"\xc1")
    assert run_all(queue) == {healthy.id}
    assert len(damaged_ids(logs)) == NUM_DAMAGED
    # A quarter of the queue is this owner's, as before.
    for _ in range(NUM_DAMAGED + 4):
        queue.submit("o", b"{}")


@pytest.mark.parametrize("act", ["find", "cancel", "submit again", "purge", "renew"])
def test_each_use_of_a_damaged_job_sets_it_aside(
    queue: JobQueue, damage: Damage, clock: Clock, logs: list[Any], act: str
) -> None:
    job = queue.submit("o", b"{}", "key")[0]
    leased = queue.lease() if act == "renew" else None
    damage.replace_data(job, b"\xc1")
    if act == "submit again":
        assert queue.submit("o", b"{}", "key")[1]
    elif act == "purge":
        clock.offset_s += 3601
        queue.purge()
    elif leased is not None:
        assert not queue.renew(leased)
        assert not queue.finish(leased, "succeeded", result=b"1")
    else:
        with pytest.raises(UnknownJob):
            (queue.find if act == "find" else queue.cancel_or_delete)(job.id, "o")
    assert damaged_ids(logs) == [job.id[:8]]
    assert queue.num_open() == int(act == "submit again")


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "change",
    [
        *("id = NULL", "id = x'00ff'", "id = CAST(x'ff41' AS TEXT)", "queue = 'expired'", "queue = 'zzz'"),
        *("queue = CAST(x'ff' AS TEXT)", "version = 'x'", "version = version + 1", "due_at = due_at - 1"),
        *("due_at = 'never'", "data = 'text'", "data = CAST(x'ff' AS TEXT)", "data = 7"),
    ],
)
def test_a_column_of_another_kind_costs_its_job_alone(queue: JobQueue, damage: Damage, change: str) -> None:
    jobs = [queue.submit("o", b"{}", f"key-{number}")[0] for number in range(NUM_DAMAGED)]
    healthy = queue.submit("o", b"{}")[0]
    is_null = change == "id = NULL"  # several may be: all others are unique
    for job in jobs if is_null or not change.startswith("id") else jobs[:1]:
        damage.execute(f"UPDATE jobs SET {change} WHERE id = ?", job.id)
    assert healthy.id in run_all(queue)
    queue.purge()
    with pytest.raises(UnknownJob):
        queue.find(jobs[0].id, "o")
    assert queue.submit("o", b"{}", "key-0")[1]


@pytest.mark.integration
@pytest.mark.parametrize("store_url", ["redis"], indirect=True)
@pytest.mark.parametrize("form", ["gone", "text", "without data", "not ascii"])
def test_a_listed_job_without_a_record_holds_nothing_up(queue: JobQueue, damage: Damage, form: str) -> None:
    """As a Redis that evicts keys leaves it."""
    jobs = [queue.submit("o", b"{}", f"key-{number}")[0] for number in range(NUM_DAMAGED)]
    with Redis.from_url(damage.url) as client:
        for number, job in enumerate(jobs):
            name = f"{{tercet}}:job:{job.id}"
            if form in {"gone", "text"}:
                client.delete(name)
            if form == "text":
                client.set(name, "x")
            if form == "without data":
                client.hdel(name, "data")
            if form == "not ascii":
                client.zadd("{tercet}:queue:open", {b"\xff%d" % number: 0})
    healthy = queue.submit("p", b"{}")[0]
    assert healthy.id in run_all(queue)
    assert queue.num_open() == 0
    assert queue.submit("o", b"{}", "key-0")[1] == (form != "not ascii")
