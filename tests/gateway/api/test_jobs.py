"""`/jobs` and `Prefer: respond-async` over stub workers and the embedded store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from falcon import testing
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from shared.api_keys import new_key, revoke_key
from tests.e2e.harness import until
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.api.test_openapi import validator
from tests.gateway.clock import Clock
from tests.gateway.generation.stubs import Refusal, hang, three_texts

BODY = {"context": "He saw", "seed": 5}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def has_room() -> threading.Event:
    """Jobs run while it is set."""
    event = threading.Event()
    event.set()
    return event


@pytest.fixture
def make_jobs_api(make_api: MakeApi, tmp_path: Path, clock: Clock, has_room: threading.Event) -> Iterator[MakeApi]:
    with ExitStack() as stack:

        def make(respond: Any = None, **settings: str) -> Api:
            queue = JobQueue(open_store(f"sqlite:{tmp_path}/jobs.sqlite3"), ttl_s=60, max_open=8, clock=clock)
            jobs = JobExecutor(queue, num_threads=2, has_room=has_room.is_set)
            stack.callback(jobs.join, 10)
            stack.callback(jobs.stop)
            return make_api(respond or three_texts, jobs=jobs, settings=settings, max_batch=48)

        yield make


@pytest.fixture
def api(make_jobs_api: MakeApi) -> Api:
    return make_jobs_api()


def result_of(api: Api, job_id: str, **options: Any) -> dict[str, Any]:
    """The job once it is final."""

    def final() -> dict[str, Any] | None:
        job: dict[str, Any] = api.request("GET", f"/jobs/{job_id}", **options).json
        return job if job["state"] not in {"queued", "running"} else None

    found: dict[str, Any] = until(final, 10, "the job's end")
    return found


def problem(response: testing.Result) -> dict[str, Any]:
    """An error's body without what differs between requests."""
    assert response.headers["content-type"] == "application/problem+json"
    return {name: value for name, value in response.json.items() if name != "request_id"}


def test_a_job_has_the_answer_of_autocomplete(api: Api) -> None:
    accepted = api.post("/jobs", BODY)
    job = accepted.json
    assert (accepted.status_code, job["state"]) == (202, "queued")
    assert accepted.headers["location"] == f"/jobs/{job['id']}"
    assert int(accepted.headers["retry-after"]) >= 1
    assert len(job["id"]) == 24  # 18 random bytes
    ended = result_of(api, job["id"])
    direct = api.complete(seed=5).json
    assert ended["state"] == "succeeded"
    assert ended["result"].keys() == direct.keys()
    assert ended["result"]["id"] == job["id"]
    assert [s["value"] for s in ended["result"]["sentences"]] == [s["value"] for s in direct["sentences"]]
    assert ended["expires_at"] == ended["finished_at"] + 60
    assert all(call.special_as_text for call in api.pool.workers[0].calls)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "a"}, None),
        ({"prompt": "a", "num_samples": None, "user": "u", "seed": -1, "top_n": -1}, None),
        ({"prompt": "a", "batch_size": 1, "nsamples": 1}, "nsamples should be n_samples"),
        ({"prompt": "a", "model_name": "124M", "min_tokens": 3}, "min_tokens was ignored"),
        ({"context": "a", "top_k": 1, "top_n": 2}, "another name of top_k"),
    ],
)
def test_a_body_with_others_names_is_not_failed_by_its_other_fields(
    api: Api, fields: dict[str, Any], named: str | None
) -> None:
    job = api.post("/jobs", fields)
    assert job.status_code == 202
    assert (named or "") in " ".join(job.json.get("warnings", []))
    assert ("warnings" in job.json) is (named is not None)
    assert result_of(api, job.json["id"])["state"] == "succeeded"


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        *(({"context": "a", name: value}, 422, name) for name, value in (("stream", True), ("session", "s"))),
        *(({"context": "a", name: value}, 422, name) for name, value in (("model_size", "x"), ("max_tokens", 10**5))),
        ({"context": "a", "prompt": "b"}, 422, "prompt"),
        ({"context": "a", "n": 1, "n_samples": 2}, 422, "n"),
        *(({"prompt": 1}, 422, "context"), ({}, 422, "context"), ([], 400, None)),
    ],
)
def test_a_wrong_request_is_refused_before_it_is_a_job(api: Api, body: Any, status: int, named: str | None) -> None:
    response = api.post("/jobs", body)
    assert response.status_code == status
    assert [error["field"] for error in problem(response).get("errors", [])] == ([named] if named else [])


def test_without_jobs_the_preference_is_ignored(make_api: MakeApi) -> None:
    api = make_api(three_texts)
    assert api.post("/autocomplete", BODY, headers={"Prefer": "respond-async"}).status_code == 200
    assert api.post("/jobs", BODY).status_code == 404


def test_a_preference_for_an_asynchronous_answer_makes_a_job(api: Api) -> None:
    """It has no field for a waiting client."""
    accepted = api.post("/autocomplete", BODY, headers={"Prefer": "wait=1, Respond-Async"})
    assert (accepted.status_code, accepted.headers["preference-applied"]) == (202, "respond-async")
    assert len(result_of(api, accepted.json["id"])["result"]["sentences"]) == 3
    assert api.post("/autocomplete", BODY, headers={"Prefer": "return=minimal"}).status_code == 200
    for name, value in (("stream", True), ("session", "s")):
        refused = api.post("/autocomplete", {**BODY, name: value}, headers={"Prefer": "respond-async"})
        assert (refused.status_code, problem(refused)["errors"][0]["field"]) == (422, name)


def test_jobs_are_in_the_openapi_document(api: Api) -> None:
    document = api.request("GET", "/openapi.json").json
    OpenAPIV31SpecValidator(document).validate()
    schemas = document["components"]["schemas"]
    assert {"prompt", "num_samples", "top_n"} <= schemas["JobRequest"]["properties"].keys()
    assert not {"stream", "session"} & schemas["JobRequest"]["properties"].keys()
    job_id = api.post("/jobs", BODY).json["id"]
    for job in (api.request("GET", f"/jobs/{job_id}").json, result_of(api, job_id)):
        validator(document, schemas["JobResponse"]).validate(job)


def test_an_idempotency_key_answers_with_the_same_job(api: Api, has_room: threading.Event) -> None:
    has_room.clear()
    first = api.post("/jobs", BODY, headers={"Idempotency-Key": "k1"})
    again = api.post("/jobs", {"prompt": "He saw", "seed": 5}, headers={"Idempotency-Key": "k1"})
    assert (again.status_code, again.json["id"]) == (202, first.json["id"])
    other = api.post("/jobs", {**BODY, "seed": 6}, headers={"Idempotency-Key": "k1"})
    assert other.status_code == 422
    assert problem(other)["errors"][0]["field"] == "Idempotency-Key"
    has_room.set()
    result_of(api, first.json["id"])
    ended = api.post("/jobs", BODY, headers={"Idempotency-Key": "k1"})
    assert (ended.status_code, ended.json["state"]) == (200, "succeeded")
    for key in ("", "k" * 256, "k\u00e9"):
        refused = api.post("/jobs", BODY, headers={"Idempotency-Key": key})
        assert refused.status_code == 422
        assert problem(refused)["errors"][0]["field"] == "Idempotency-Key"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/jobs", {"prompt": "He saw", "num_samples": 2, "top_p": None, "temperature": 1, "seed": "7", "user": "u"}),
        ("/autocomplete", {"seed": 7, "temperature": 1.0, "n": 2, "context": "He saw", "corrections": True}),
    ],
)
def test_a_job_holds_the_fields_that_its_client_sent_and_no_others(
    api: Api, has_room: threading.Event, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    has_room.clear()
    job_id = api.post(path, body, headers={"Prefer": "respond-async"}).json["id"]
    store = open_store(f"sqlite:{tmp_path}/jobs.sqlite3")
    job = store.read(job_id)
    store.close()
    assert job is not None
    assert job.request == b'{"context":"He saw","n_samples":2,"seed":7,"temperature":1.0}'


def test_queued_jobs_of_a_revoked_key_are_cancelled(
    make_jobs_api: MakeApi, tmp_path: Path, has_room: threading.Event
) -> None:
    """Without being computed; those of other keys are computed."""
    (key, record), (other, _) = (new_key(tmp_path / "keys", name) for name in ("revoked", "other"))
    api = make_jobs_api(keys=str(tmp_path / "keys"), key_rate="0")
    mine, theirs = ({"headers": {"Authorization": f"Bearer {each}"}} for each in (key, other))
    has_room.clear()
    ids = [api.post("/jobs", BODY, **mine).json["id"] for _ in range(2)]
    job_id = api.post("/jobs", BODY, **theirs).json["id"]
    revoke_key(tmp_path / "keys", record.id)
    until(lambda: api.request("GET", f"/jobs/{ids[0]}", **mine).status_code == 401, 10, "the key is refused")
    has_room.set()
    assert result_of(api, job_id, **theirs)["state"] == "succeeded"
    store = open_store(f"sqlite:{tmp_path}/jobs.sqlite3")
    assert [job.state for job in map(store.read, ids) if job is not None] == ["cancelled"] * 2
    store.close()
    assert len(api.pool.workers[0].calls) == 3


def test_a_running_job_is_cancelled_and_its_branches_end(make_jobs_api: MakeApi) -> None:
    api = make_jobs_api(hang)
    job_id = api.post("/jobs", BODY).json["id"]
    until(lambda: sum(api.pool.admission.in_flight()) == 3, 5, "its branches run")
    assert api.request("DELETE", f"/jobs/{job_id}").status_code == 204
    until(lambda: sum(api.pool.admission.in_flight()) == 0, 1, "its branches end")
    job = api.request("GET", f"/jobs/{job_id}").json
    assert (job["state"], "result" in job) == ("cancelled", False)


def test_a_failed_job_has_the_error_of_autocomplete(make_jobs_api: MakeApi) -> None:
    api = make_jobs_api(lambda request: [Refusal(500, "internal_error")])
    ended = result_of(api, api.post("/jobs", BODY).json["id"])
    assert (ended["state"], ended["error"]["code"], "result" in ended) == ("failed", "no_completion", False)


def test_a_job_of_another_key_is_answered_as_an_unknown_one(
    make_jobs_api: MakeApi, tmp_path: Path, clock: Clock
) -> None:
    """S10."""
    owner, other = (new_key(tmp_path / "keys", name)[0] for name in ("owner", "other"))
    api = make_jobs_api(keys=str(tmp_path / "keys"), key_rate="0")
    mine, theirs = ({"headers": {"Authorization": f"Bearer {key}"}} for key in (owner, other))
    job_id = api.post("/jobs", BODY, **mine).json["id"]
    result_of(api, job_id, **mine)
    unknown = problem(api.request("GET", f"/jobs/{'A' * 24}", **theirs))
    for method in ("GET", "DELETE"):
        response = api.request(method, f"/jobs/{job_id}", **theirs)
        assert (response.status_code, problem(response)) == (404, unknown)
        assert api.request(method, f"/jobs/{job_id}").status_code == 401
    assert api.request("GET", f"/jobs/{job_id}", **mine).json["state"] == "succeeded"
    clock.now += 61
    assert problem(api.request("GET", f"/jobs/{job_id}", **theirs)) == unknown
    assert api.request("GET", f"/jobs/{job_id}", **mine).status_code == 410


def test_jobs_are_answered_while_the_store_is_unavailable(make_jobs_api: MakeApi, tmp_path: Path) -> None:
    (tmp_path / "jobs.sqlite3").mkdir()
    api = make_jobs_api()
    for response in (api.post("/jobs", BODY), api.request("GET", f"/jobs/{'A' * 24}")):
        assert (response.status_code, problem(response)["code"]) == (503, "jobs_unavailable")
        assert "TERCET_JOBS" in problem(response)["detail"]
    assert api.complete().status_code == 200
