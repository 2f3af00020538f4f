"""What Ray's proxy adds to a branch: the same requests to one worker by TCP and to one worker on Ray, interleaved.

`-s` prints the figures that docs/RAY.md quotes. No figure is asserted.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.load.rounds import percentile
from tests.e2e.harness import free_port
from tests.workers.contract import PROMPT, Endpoint
from tests.workers.tcp_worker import running_tcp_worker

pytestmark = [pytest.mark.deploy, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
NUM_ROUNDS, NUM_REQUESTS, NUM_CLIENTS = 5, 40, 8
ONE_TOKEN = {"max_new_tokens": 1, "temperature": 0.0}


def latencies_s(endpoint: Endpoint, name: str, number: int) -> list[float]:
    """Seconds of requests one after another on a kept connection, each with a prompt of its own."""
    found = []
    for index in range(number):
        start = time.perf_counter()
        lines = endpoint.generate(prompt=f"{PROMPT} {name} {index}", sampling=ONE_TOKEN, session=f"{name} {index}")
        found.append(time.perf_counter() - start)
        assert lines[-1]["finish_reason"] in {"length", "stop"}
    return found


def throughput(endpoint: Endpoint, name: str) -> float:
    """Answers a second of `NUM_CLIENTS` clients that each wait for their answers."""
    start = time.perf_counter()
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        done = [
            clients.submit(latencies_s, Endpoint(endpoint.url, endpoint.keys), f"{name} {client}", NUM_REQUESTS // 2)
            for client in range(NUM_CLIENTS)
        ]
        number = sum(len(each.result()) for each in done)
    return number / (time.perf_counter() - start)


def test_the_latency_of_a_branch_through_ray_and_by_tcp(tmp_path: Path) -> None:
    from tests.deploy.ray.cluster import running_pool

    (tmp_path / "ray").mkdir()
    with running_pool(tmp_path / "ray", num_nodes=1) as pool:
        pool.deploy(min_workers=1, max_workers=1, max_batch=16, num_ingresses=1)
        pool.wait_for_workers(1)
        with running_tcp_worker(tmp_path, free_port(), max_batch="16") as worker:
            contenders = {"tcp": worker, "ray": pool.endpoint}
            rounds: dict[str, list[float]] = {name: [] for name in contenders}
            rates: dict[str, list[float]] = {name: [] for name in contenders}
            for endpoint in contenders.values():
                latencies_s(endpoint, "warm-up", NUM_REQUESTS)
            for number in range(NUM_ROUNDS):
                for name, endpoint in contenders.items():
                    rounds[name] += latencies_s(endpoint, f"round {number}", NUM_REQUESTS)
                for name, endpoint in contenders.items():
                    rates[name].append(throughput(endpoint, f"rate {number}"))
    for name, found in rounds.items():
        median_ms, p90_ms = (1e3 * percentile(found, share) for share in (0.5, 0.9))
        rate = percentile(rates[name], 0.5)
        sys.stdout.write(f"\n{name}: median {median_ms:.1f} ms, p90 {p90_ms:.1f} ms, {rate:.0f} answers a second\n")
