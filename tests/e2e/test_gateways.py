"""Two gateways on one pool: what holds across them with a shared store (`shared`), and what does not without (`apart`).

Each row of the table in docs/DISTRIBUTED.md, "Several gateways". `balanced` sends a session's requests to the same
gateway of `apart` by nginx.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.api_keys import new_key
from tests.e2e.gateways import running_gateways
from tests.e2e.harness import Tercet, until
from tests.gateway.jobs.servers import find_redis, volatile_redis
from tests.nginx import nginx

pytestmark = pytest.mark.skipif(find_redis() is None, reason="apt-get install redis-server")
RATE = 5
LONG, SHORT = 60, 2  # tokens; each takes 10 ms


@dataclass
class Pair:
    """Two ways to gateways with the same settings."""

    name: str
    clients: tuple[httpx.Client, httpx.Client]
    keys: dict[str, str]

    def post(self, number: int, path: str, body: dict[str, Any], key: str = "plain", **headers: str) -> httpx.Response:
        """A request by the first way (0) or the second (1)."""
        headers["x-api-key"] = self.keys[key]
        return self.clients[number].post(path, json=body, headers=headers)

    def complete(self, number: int, key: str = "plain", session: str = "", **fields: Any) -> httpx.Response:
        headers = {"X-Session-Id": session} if session else {}
        body = {"context": "The old man looked at the sea and", "n_samples": 1, "length": SHORT, "clean": False}
        return self.post(number, "/autocomplete", {**body, **fields}, key, **headers)

    @contextmanager
    def running(self, number: int, **fields: Any) -> Iterator[list[httpx.Response]]:
        """A request that runs meanwhile; afterwards, its response is in the list."""
        responses: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: responses.append(self.complete(number, **{"length": LONG, **fields})))
        thread.start()
        time.sleep(0.15)  # it has arrived, and is being computed
        yield responses
        thread.join()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    made = {
        "plain": new_key(path, "plain", rate=0, concurrency=0)[0],
        "alone": new_key(path, "alone", rate=0, concurrency=1)[0],
        **{f"limited {name}": new_key(path, "limited", rate=RATE, concurrency=0)[0] for name in ("shared", "apart")},
    }
    return path, made


@pytest.fixture(scope="module")
def gateways(
    tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, dict[str, str]]
) -> Iterator[dict[str, Tercet]]:
    """Four gateways on one pool of two workers."""
    base = tmp_path_factory.mktemp("t")
    with volatile_redis(base) as redis:
        apart = {"keys": str(keys[0]), "jobs": ""}
        shared = {**apart, "redis": redis.url, "jobs": redis.url}
        settings = {"a": shared, "b": shared, "c": apart, "d": apart}
        for name in ("c", "d"):
            settings[name] = {**apart, "jobs": f"sqlite:{base / name}.sqlite3"}
        with running_gateways(base, settings, step_delay_ms=10, max_batch=32) as (_, started):
            yield dict(started)


@pytest.fixture(scope="module")
def shared(gateways: dict[str, Tercet], keys: tuple[Path, dict[str, str]]) -> Pair:
    return Pair("shared", (gateways["a"].client, gateways["b"].client), keys[1])


@pytest.fixture(scope="module")
def apart(gateways: dict[str, Tercet], keys: tuple[Path, dict[str, str]]) -> Pair:
    return Pair("apart", (gateways["c"].client, gateways["d"].client), keys[1])


@pytest.fixture(scope="module")
def balanced(
    tmp_path_factory: pytest.TempPathFactory, gateways: dict[str, Tercet], keys: tuple[Path, dict[str, str]]
) -> Iterator[Pair]:
    """Both ways lead through nginx."""
    if shutil.which("nginx") is None:
        pytest.skip("apt-get install nginx-light")
    ports = [gateways[name].port for name in ("c", "d")]
    with (
        nginx(tmp_path_factory.mktemp("nginx"), ports) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
    ):
        yield Pair("balanced", (client, client), keys[1])


@pytest.fixture(params=["shared", "apart", "balanced"], scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(request.param)
    return found


def test_supersede(pair: Pair) -> None:
    with pair.running(0, session="s") as older:
        newer = pair.complete(1, session="s")
    assert newer.status_code == 200, newer.text
    if pair.name == "apart":
        assert older[0].status_code == 200
    else:
        assert (older[0].status_code, older[0].json()["code"]) == (409, "superseded")


def test_a_stream_is_superseded_too(shared: Pair) -> None:
    headers = {"X-Session-Id": "streamed", "x-api-key": shared.keys["plain"]}
    body = {"context": "She opened the door, and", "length": LONG, "stream": True}
    with shared.clients[0].stream("POST", "/autocomplete", json=body, headers=headers) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: token"
        assert shared.complete(1, session="streamed").status_code == 200
        *_, last = [line for line in lines if line]
    assert '"superseded"' in last


def test_feedback(pair: Pair) -> None:
    answer = pair.complete(0, session="f")
    report = {"id": answer.json()["id"], "index": 0, "action": "accepted", "characters": 3}
    found = pair.post(1, "/feedback", report, **{"X-Session-Id": "f"}).status_code
    assert found == (404 if pair.name == "apart" else 204)


# Behind nginx a key's sessions are at several gateways, so its limits hold as `apart`.
LIMITED = pytest.mark.parametrize("pair", ["shared", "apart"], indirect=True)


@LIMITED
def test_rates(pair: Pair) -> None:
    key = f"limited {pair.name}"
    started_at = time.monotonic()
    statuses = [pair.complete(number % 2, key, length=0).status_code for number in range(3 * RATE)]
    refilled = (time.monotonic() - started_at) * RATE / 60
    assert set(statuses) == {422, 429}
    num_taken = statuses.count(422)
    gateways = 1 if pair.name == "shared" else 2
    assert gateways * RATE <= num_taken <= gateways * (RATE + refilled + 1)


@LIMITED
def test_concurrency(pair: Pair) -> None:
    with pair.running(0, key="alone") as first:
        second = pair.complete(1, "alone").status_code
    assert first[0].status_code == 200
    assert second == (200 if pair.name == "apart" else 429)
    assert pair.complete(1, "alone").status_code == 200


def test_jobs(pair: Pair) -> None:
    """By nginx they stay at the gateway of their key: without a session, that is what it hashes."""
    job = pair.post(0, "/jobs", {"prompt": "The old man", "num_samples": 1, "length": SHORT}).json()
    path, headers = f"/jobs/{job['id']}", {"x-api-key": pair.keys["plain"]}
    if pair.name == "apart":
        assert pair.clients[1].get(path, headers=headers).json()["code"] == "unknown_job"
    else:
        until(lambda: pair.clients[1].get(path, headers=headers).json()["state"] == "succeeded", 10, "the job's end")


def test_the_prefix_cache(pair: Pair) -> None:
    """It is the workers'. A gateway that does not know which of them has the document may compute its prompt again."""
    context = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
    found = [
        pair.complete(number % 2, session=f"p {pair.name}", context=context).json()["sentences"][0]["cached_tokens"]
        for number in range(6)
    ]
    assert found[0] == 0
    assert all(cached > 0 for cached in found[2:])
    if pair.name == "balanced":
        assert found[1] > 0


def test_each_gateway_has_its_own_metrics_and_no_use_of_the_store_failed(
    gateways: dict[str, Tercet], shared: Pair
) -> None:
    def count(name: str, line: str) -> float:
        headers = {"x-api-key": shared.keys["plain"]}
        lines = gateways[name].client.get("/metrics", headers=headers).text.splitlines()
        return sum(float(each.rpartition(" ")[2]) for each in lines if each.startswith(line))

    requests = 'tercet_requests_total{route="/autocomplete"'
    before = {name: count(name, requests) for name in ("a", "b")}
    shared.complete(0)
    assert {name: count(name, requests) - before[name] for name in ("a", "b")} == {"a": 1, "b": 0}
    assert [count(name, "tercet_redis_failures_total") for name in ("a", "b")] == [0, 0]
