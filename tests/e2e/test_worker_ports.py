"""Workers on TCP, without a gateway: TLS, keys, what a client without a key can hold, reload, drain, rotation."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial

import httpx
import psutil
import pytest

from tests.e2e.harness import PATIENCE_S, serving, until
from tests.e2e.remote_pool import Workers

PROMPT = {"prompt": "The old man looked at the sea and", "seed": 7}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with serving(Workers(tmp_path_factory.mktemp("t"), 1)) as pool:
        yield pool


def is_refused(client: httpx.Client) -> bool:
    try:
        return client.get("/state?once").status_code == 401
    except httpx.TransportError:  # the worker is busy with its model, or has closed a connection with the old key
        return False


def test_keys_and_certificate_are_rotated_without_a_restart(workers: Workers) -> None:
    old, new = workers.key, "n" * 48
    with workers.tcp() as with_old, workers.tcp(key=new) as with_new:
        until(partial(is_refused, with_new), PATIENCE_S, "new key refused")
        workers.write_keys(old, new)
        until(lambda: with_new.get("/state?once").status_code == 200, PATIENCE_S, "new key accepted")
        assert with_old.get("/state?once").status_code == 200
        workers.write_keys("too short")  # a mistake changes nothing
        until(lambda: workers.events("files_not_read"), 10, "the mistake noticed")
        assert with_old.get("/state?once").status_code == 200
        workers.write_keys(new)
        until(partial(is_refused, with_old), PATIENCE_S, "old key refused")
        workers.key = new
    expiry = datetime(2040, 1, 1, tzinfo=UTC)
    workers.certificate.renew(expiry)

    def trusts_new() -> bool:
        with workers.tcp() as client:
            try:
                return client.get("/health/live").status_code == 200
            except httpx.ConnectError:
                return False

    until(trusts_new, PATIENCE_S, "new certificate")
    with workers.tcp() as client:
        assert client.get("/state?once").json()["certificate_expires_at"] == expiry.timestamp()


def test_workers_listen_at_their_ports_only(workers: Workers) -> None:
    """S5, with TERCET_POOL_BIND; test_pools.py has S5 without it."""
    ports = {
        connection.laddr.port
        for processes in workers.processes().values()
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ports == {workers.pool_port}


@pytest.mark.deploy
def test_a_reload_and_a_stop_lose_no_request_and_probes_see_the_drain(workers: Workers) -> None:
    """Last in this module: it replaces the pool's worker, twice."""
    pid = workers.processes()["workers"][1].pid
    workers.process.send_signal(signal.SIGHUP)
    num_refused = 0
    while psutil.pid_exists(pid):
        with workers.tcp() as client:
            response = client.post("/generate", json=PROMPT)
        num_refused += response.status_code != 200
        assert response.status_code == 200 or response.json()["code"] == "not_ready", response.text
    assert num_refused <= 1  # it was accepted by the predecessor just before that stopped accepting
    with workers.tcp() as client:
        assert client.get("/health/ready").status_code == 200
        os.kill(workers.processes()["workers"][1].pid, signal.SIGTERM)
        until(lambda: client.get("/health/ready").status_code == 503, 5, "readiness off")
