"""Two gateways on one pool behind nginx, which share nothing but the workers."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.http_client import completion_request
from tests.chaos.load import Load, count_failures
from tests.e2e.harness import metric, serving, until
from tests.e2e.remote_pool import Gateway, Workers
from tests.nginx import nginx

needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="apt-get install nginx-light")
LONG, SHORT = 256, 2  # tokens; each takes 10 ms


def complete(client: httpx.Client, session: str, **fields: Any) -> httpx.Response:
    headers = {"X-Session-Id": session}
    body = {"context": "The old man looked at the sea and", "n_samples": 1, "length": SHORT, "clean": False}
    return client.post("/autocomplete", json={**body, **fields}, headers=headers)


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    base = tmp_path_factory.mktemp("w")
    with serving(Workers(base, is_alone=False, test_step_delay_ms="0=10,1=10", max_batch="32")) as workers:
        yield workers


@pytest.fixture(scope="module")
def gateways(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Gateway]]:
    """Two with the same settings, beside that of the workers' machine."""
    base = tmp_path_factory.mktemp("g")
    with ExitStack() as stack:
        made = [Gateway(base / name, **workers.gateway_settings) for name in "ab"]
        yield [stack.enter_context(serving(gateway)) for gateway in made]


@pytest.mark.parametrize("strategy", ["sample", "predict"])
def test_answers_are_those_of_the_gateway_on_the_workers_machine(
    workers: Workers, gateways: list[Gateway], strategy: str
) -> None:
    answers = [server.ask(length=12, seed=11, strategy=strategy) for server in (workers, *gateways)]
    local, *remote = [[(one["value"], one["score"]) for one in answer["sentences"]] for answer in answers]
    assert len(local) == 3
    assert remote == [local] * 2
    for gateway in gateways:
        assert workers.key not in gateway.log() + str(gateway.wait_until_warm()) + str(gateway.ready())


@needs_nginx
def test_a_session_is_at_one_gateway_which_knows_its_requests_and_answers(
    gateways: list[Gateway], short_tmp_path: Path
) -> None:
    def num_in_flight() -> float:
        return sum(metric(gateway, "tercet_slot_in_flight_branches") for gateway in gateways)

    with (
        nginx(short_tmp_path, [gateway.port for gateway in gateways]) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client,
    ):
        for session in map(str, range(8)):  # all eight are at the same gateway once in 128 runs
            with ThreadPoolExecutor(1) as threads:
                older = threads.submit(complete, client, session, length=LONG)
                until(num_in_flight, 10, "the older request is computed")
                newer = complete(client, session)
            assert newer.status_code == 200, newer.text
            assert (older.result().status_code, older.result().json()["code"]) == (409, "superseded")
            report = {"id": newer.json()["id"], "index": 0, "action": "accepted", "characters": 1}
            assert client.post("/feedback", json=report, headers={"X-Session-Id": session}).status_code == 204


@needs_nginx
def test_a_killed_gateway_fails_no_request_behind_nginx_and_takes_its_part_again(
    gateways: list[Gateway], short_tmp_path: Path
) -> None:
    """All its processes are killed at once."""

    def request(rng: random.Random) -> bytes:  # with a session of its own, so that both gateways get some
        return completion_request(headers={"X-Session-Id": f"s{rng.randrange(10**9)}"}, length=SHORT)

    def num_answers() -> float:
        return metric(killed, 'tercet_requests_total{route="/autocomplete",status="200"}')

    killed, _ = gateways
    quick_return = {"fail_timeout=5s": "fail_timeout=1s"}
    with nginx(short_tmp_path, [gateway.port for gateway in gateways], quick_return) as port:
        load = Load(port, 3, make_request=request)
        with load.running():
            load.wait_for(10)
            master = psutil.Process(killed.process.pid)
            for process in (master, *master.children(recursive=True)):
                process.kill()
            killed.process.wait()
            load.wait_for(20)
            killed.start()
            killed.wait_until_announced()
            until(num_answers, 20, "the gateway that was killed answers requests again")
    assert not count_failures(load.answers), count_failures(load.answers)
