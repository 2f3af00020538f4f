"""What every job store promises: one suite over SQLite, a real redis-server, and DynamoDB (moto's server)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis

from gateway.jobs.queue import LEASE_S, MAX_ATTEMPTS, JobQueue
from gateway.jobs.store import REMEMBERED_S, Job, JobStore
from shared.errors import InvalidRequest, JobExpired, Overloaded, QuotaExceeded, UnknownJob
from tests.gateway.jobs.conftest import Clock, MakeQueue
from tests.gateway.jobs.servers import dynamodb_table, start_child

CANARY = b"canary-3b1f60c2"


def submit(queue: JobQueue, request: bytes = b"{}", owner: str = "o", key: str | None = None) -> Job:
    return queue.submit(owner, request, key)[0]


def lease(queue: JobQueue) -> Job:
    job = queue.lease()
    assert job is not None
    return job


def test_a_job_runs_from_its_submission_to_its_result(queue: JobQueue) -> None:
    submitted = submit(queue, b'{"a": 1}')
    assert (submitted.state, queue.num_open()) == ("queued", 1)
    leased = lease(queue)
    assert (leased.id, leased.request, queue.find(leased.id, "o").state) == (submitted.id, b'{"a": 1}', "running")
    assert queue.finish(leased, "succeeded", result=b"[1]")
    found = queue.find(leased.id, "o")
    assert (found.state, found.result, found.request, queue.num_open()) == ("succeeded", b"[1]", b"", 0)
    assert queue.lease() is None


def test_jobs_are_leased_in_the_order_of_their_submission(queue: JobQueue) -> None:
    ids = [submit(queue).id for _ in range(5)]
    assert [lease(queue).id for _ in ids] == ids


def test_a_lease_is_exclusive_among_processes(queue: JobQueue, store_url: str) -> None:
    ids = [submit(queue).id for _ in range(12)]
    children = [start_child(store_url, "lease-all") for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    leased: list[str] = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        leased += child.communicate()[0].split()
        assert child.returncode == 0
    assert Counter(leased) == Counter(ids)


def test_a_lapsed_lease_is_given_again_and_only_its_holder_stores(queue: JobQueue, clock: Clock) -> None:
    submit(queue)
    first = lease(queue)
    clock.offset_s += LEASE_S + 1
    second = lease(queue)
    assert (second.id, second.attempts) == (first.id, 2)
    assert not queue.renew(first)
    assert not queue.finish(first, "succeeded", result=b"1")
    assert queue.finish(second, "succeeded", result=b"2")
    assert not queue.finish(second, "failed", error=b"{}")
    assert queue.find(first.id, "o").result == b"2"


def test_the_first_of_several_results_wins(make_queue: MakeQueue) -> None:
    queues = [make_queue() for _ in range(4)]
    submit(queues[0])
    job = lease(queues[0])

    def finish(index: int) -> bool:
        return queues[index].finish(job, "succeeded", result=b"%d" % index)

    with ThreadPoolExecutor(4) as pool:
        stored = list(pool.map(finish, range(4)))
    assert sum(stored) == 1
    assert queues[0].find(job.id, "o").result == b"%d" % stored.index(True)


def test_a_renewed_lease_does_not_lapse(queue: JobQueue, clock: Clock) -> None:
    submit(queue)
    job = lease(queue)
    for _ in range(3):
        clock.offset_s += LEASE_S / 2
        assert queue.renew(job)
        assert queue.lease() is None


def test_a_job_that_was_put_back_waits_and_its_attempt_does_not_count(queue: JobQueue, clock: Clock) -> None:
    submit(queue)
    assert queue.put_back(lease(queue), 5.0)
    assert queue.lease() is None
    clock.offset_s += 6
    assert lease(queue).attempts == 1


def test_a_job_whose_runners_all_died_fails(queue: JobQueue, clock: Clock) -> None:
    job = submit(queue)
    for _ in range(MAX_ATTEMPTS):
        lease(queue)
        clock.offset_s += LEASE_S + 1
    assert queue.lease() is None
    found = queue.find(job.id, "o")
    assert (found.state, b"job_abandoned" in found.error, found.request) == ("failed", True, b"")


@pytest.mark.parametrize("is_running", [False, True])
def test_a_cancelled_job_stores_no_result(queue: JobQueue, is_running: bool) -> None:
    job = submit(queue)
    leased = lease(queue) if is_running else job
    queue.cancel_or_delete(job.id, "o")
    assert (queue.find(job.id, "o").state, queue.num_open()) == ("cancelled", 0)
    assert queue.lease() is None
    assert not queue.renew(leased)
    assert not queue.finish(leased, "succeeded", result=b"1")
    assert queue.find(job.id, "o").state == "cancelled"


def test_a_final_job_is_deleted(queue: JobQueue) -> None:
    job = submit(queue, key="k")
    queue.finish(lease(queue), "succeeded", result=b"1")
    queue.cancel_or_delete(job.id, "o")
    with pytest.raises(UnknownJob):
        queue.find(job.id, "o")
    assert submit(queue, key="k").id != job.id


def test_a_job_belongs_to_its_owner(queue: JobQueue) -> None:
    job = submit(queue)
    refusals = []
    for job_id, owner in ((job.id, "other"), (job.id, ""), ("A" * 24, "o"), ("", "o"), ("../x", "o"), ("é" * 24, "o")):
        for act in (queue.find, queue.cancel_or_delete):
            with pytest.raises(UnknownJob) as caught:
                act(job_id, owner)
            refusals.append(caught.value.problem())
    assert len(set(refusals)) == 1
    assert queue.find(job.id, "o").state == "queued"


def test_an_expired_job_is_not_shown_then_forgotten(queue: JobQueue, clock: Clock) -> None:
    done, waiting = submit(queue, key="k"), submit(queue)
    queue.finish(lease(queue), "succeeded", result=b"1")
    clock.offset_s += 3599
    assert queue.find(done.id, "o").result == b"1"
    clock.offset_s += 2
    for job in (done, waiting):
        with pytest.raises(JobExpired):
            queue.find(job.id, "o")
        with pytest.raises(UnknownJob):
            queue.find(job.id, "other")
    assert queue.lease() is None
    assert submit(queue, key="k").id != done.id
    queue.purge()
    clock.offset_s += REMEMBERED_S + 1
    queue.purge()
    with pytest.raises(UnknownJob):
        queue.find(done.id, "o")


def test_a_purge_expires_what_no_client_reads(
    queue: JobQueue, open_again: Callable[[], JobStore], clock: Clock
) -> None:
    ids = [submit(queue).id for _ in range(3)]
    queue.finish(lease(queue), "succeeded", result=CANARY)
    lease(queue)
    clock.offset_s += 3601
    assert sum(iter(queue.purge, 0)) == 3  # a purge takes a bounded time
    store = open_again()
    jobs = [store.read(job_id) for job_id in ids]
    assert [(job.state, job.result, job.request) for job in jobs if job] == [("expired", b"", b"")] * 3


def test_a_running_job_does_not_expire(make_queue: MakeQueue, clock: Clock) -> None:
    queue = make_queue(ttl_s=2.5)
    submit(queue)
    job = lease(queue)
    clock.offset_s += 3
    assert queue.purge() == 0
    assert queue.find(job.id, "o").state == "running"
    assert queue.finish(job, "succeeded", result=b"1")
    assert queue.find(job.id, "o").result == b"1"


def test_an_idempotency_key_makes_one_job(queue: JobQueue) -> None:
    job = submit(queue, b"1", key="k")
    assert queue.submit("o", b"1", "k") == (job, False)
    with pytest.raises(InvalidRequest, match=r"^Idempotency-Key was sent before with another request"):
        queue.submit("o", b"2", "k")
    assert submit(queue, b"1", owner="other", key="k").id != job.id
    queue.finish(lease(queue), "succeeded", result=b"1")
    assert submit(queue, b"1", key="k").result == b"1"


def test_an_idempotency_key_makes_one_job_under_concurrency(make_queue: MakeQueue) -> None:
    queues = [make_queue() for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        submitted = list(pool.map(lambda queue: queue.submit("o", b"1", "k"), queues))
    assert len({job.id for job, _ in submitted}) == 1
    assert sum(is_new for _, is_new in submitted) == 1
    assert queues[0].num_open() == 1


def test_the_queue_is_bounded_in_all_and_for_each_owner(make_queue: MakeQueue) -> None:
    queue = make_queue(max_open=8)
    first = submit(queue, owner="a", key="k")
    submit(queue, owner="a")
    with pytest.raises(QuotaExceeded, match=r"2 jobs of this API key .*TERCET_JOB_QUEUE") as refused:
        submit(queue, owner="a")
    assert refused.value.headers["Retry-After"]
    assert submit(queue, owner="a", key="k").id == first.id
    for owner in ("b", "b", "c", "c", "", ""):
        submit(queue, owner=owner)
    with pytest.raises(Overloaded, match="at most 8 jobs"):
        submit(queue, owner="d")
    queue.cancel_or_delete(first.id, "a")
    submit(queue, owner="a")


def raw_bytes(url: str) -> bytes:
    """Everything that the store holds, as it holds it."""
    if url.startswith("sqlite:"):
        path = Path(url.removeprefix("sqlite:"))
        return b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
    if url.startswith("redis:"):
        with Redis.from_url(url) as connection:
            return b"".join(connection.dump(name) or b"" for name in connection.scan_iter())
    with dynamodb_table(url) as (client, table):
        return repr(client.scan(TableName=table)["Items"]).encode()


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled", "expired"])
def test_a_prompt_is_erased_at_the_end_and_a_result_at_expiry(
    queue: JobQueue, store_url: str, clock: Clock, end: str
) -> None:
    job = submit(queue, b'"' + CANARY + b'"', key="k")
    assert CANARY in raw_bytes(store_url)
    if end == "cancelled":
        queue.cancel_or_delete(job.id, "o")
    elif end == "failed":
        queue.finish(lease(queue), "failed", error=b"{}")
    elif end == "succeeded":
        queue.finish(lease(queue), "succeeded", result=b"result-" + CANARY[::-1])
        assert CANARY[::-1] in raw_bytes(store_url)
    assert (CANARY in raw_bytes(store_url)) == (end == "expired")
    clock.offset_s += 3601
    queue.purge()
    held = raw_bytes(store_url)
    assert CANARY not in held
    assert CANARY[::-1] not in held
