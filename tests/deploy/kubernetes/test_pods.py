"""The processes of overlays/cpu as its pods would run them: from loading to ready, and replaced under load.

Not shown: the image (test_container.py runs it), an API server, kube-proxy, and a network plugin.
"""

from __future__ import annotations

import json
import random
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from shared.api_keys import new_key
from tests.deploy.kubernetes.pods import Cluster, Pod, cluster
from tests.deploy.kubernetes.rendered import workloads
from tests.deploy.needs import need
from tests.e2e.harness import until

OVERLAY = "overlays/cpu"
NUM_CLIENTS = 3

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(300)]


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that every user may enter; pytest's own is for this user only."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def secret_files(base: Path) -> tuple[dict[str, bytes], str]:
    """What the commands of docs/KUBERNETES.md put into secrets, by mounted path; and an API key."""
    authority = trustme.CA()
    issued = authority.issue_cert("tercet-workers.tercet.svc")
    key, _ = new_key(base / "keys", "test", rate=0, concurrency=0)
    return {
        "/etc/tercet/api-keys/keys": (base / "keys").read_bytes(),
        "/etc/tercet/pool-key/keys": f"{secrets.token_hex(32)}\n".encode(),
        "/etc/tercet/pool-ca/ca.crt": authority.cert_pem.bytes(),
        "/etc/tercet/pool-tls/tls.crt": b"".join(part.bytes() for part in issued.cert_chain_pems),
        "/etc/tercet/pool-tls/tls.key": issued.private_key_pem.bytes(),
    }, key


class Clients:
    """Clients of the gateway's Service: each request on a connection of its own, to one of the ready pods."""

    def __init__(self, made: Cluster, key: str) -> None:
        self.answers: list[int | str] = []  # statuses, or how a connection was lost
        self._made, self._headers = made, {"Authorization": f"Bearer {key}"}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(n),)) for n in range(NUM_CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        self.wait_for(5)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        target = len(self.answers) + more
        until(lambda: len(self.answers) >= target, 60, f"{more} more answers")

    def _run(self, rng: random.Random) -> None:
        self._made.node.enter()
        while not self._stop.is_set():
            body = {"context": f"She opened door {rng.randrange(10**6)}, and", "length": 12}
            address = rng.choice(self._made.addresses("tercet-gateway"))
            try:
                answer = httpx.post(
                    f"http://{address}:8000/autocomplete", json=body, headers=self._headers, timeout=30, trust_env=False
                )
                self.answers.append(answer.status_code)
            except httpx.TransportError as error:
                self.answers.append(repr(error))


def ready(pod: Pod) -> Pod:
    until(lambda: pod.is_ready or not pod.thread.is_alive(), 90, f"ready; {pod.log()[-3000:]}")
    assert pod.is_ready, pod.log()[-3000:]
    return pod


def ended(pod: Pod) -> None:
    pod.delete()
    pod.thread.join(90)
    assert pod.exit_code == 0, pod.log()[-3000:]
    assert pod.num_restarts == 0


def get(made: Cluster, pod: Pod, path: str) -> tuple[int, Any]:
    """Status and body of a gateway's page."""
    found: list[tuple[int, Any]] = []

    def fetch() -> None:
        made.node.enter()
        answer = httpx.get(f"http://{pod.address}:8000{path}", timeout=10, trust_env=False)
        found.append((answer.status_code, json.loads(answer.text)))

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    return found[0]


def test_pods_load_before_they_get_requests_and_are_replaced_without_losing_one(base: Path) -> None:
    need("iproute2:ip", "util-linux:setpriv", "mount", root=True)
    files, key = secret_files(base)
    templates = dict(workloads(OVERLAY))
    with cluster(OVERLAY, base, files) as made:
        gateway = made.start("tercet-gateway", templates["tercet-gateway"])
        until(lambda: gateway.readiness or not gateway.thread.is_alive(), 60, f"started; {gateway.log()[-3000:]}")
        # It starts without workers: alive, and not ready.
        assert get(made, gateway, "/health/live")[0] == 200
        assert get(made, gateway, "/health/ready")[0] == 503
        workers = [made.start("tercet-workers", templates["tercet-workers"]) for _ in range(2)]
        started_at = time.monotonic()
        for worker in workers:
            ready(worker)
        ready(gateway)
        print(f"two workers and the gateway ready after {time.monotonic() - started_at:.1f} s")
        assert gateway.readiness == [503, 200]
        for worker in workers:
            # No connection before the port is open, then 503 while the model loads.
            assert worker.readiness in ([0, 503, 200], [503, 200]), worker.readiness
        with Clients(made, key) as clients:
            # A rollout of the workers: a new pod first (maxSurge 1), then an old one ends.
            successor = ready(made.start("tercet-workers", templates["tercet-workers"]))
            until(lambda: len(get(made, gateway, "/health/ready")[1]["slots"]) == 3, 20, "the new pod is a slot")
            clients.wait_for(10)
            ended(workers[0])
            until(lambda: len(get(made, gateway, "/health/ready")[1]["slots"]) == 2, 20, "the old pod is none")
            # One of the gateway.
            second = ready(made.start("tercet-gateway", templates["tercet-gateway"]))
            clients.wait_for(10)
            ended(gateway)
            clients.wait_for(10)
            assert second.is_ready
            assert successor.is_ready
        print(
            f"{len(clients.answers)} requests; a worker ended after {workers[0].stop_s:.1f} s, the gateway after"
            f" {gateway.stop_s:.1f} s"
        )
        assert set(clients.answers) == {200}, clients.answers
