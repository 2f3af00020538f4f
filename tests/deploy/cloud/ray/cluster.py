"""A real Ray cluster on this machine: nodes are raylets of their own, with processes of their own, behind one port.

The proxies of all nodes listen on the same address (SO_REUSEPORT), so the kernel spreads connections over them, as a
load balancer in front of real nodes does. CPUs are a count that Ray is given; nothing else is faked.
"""

from __future__ import annotations

import gc
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from deploy.cloud.ray.app import application
from deploy.cloud.ray.replica import WorkerReplica
from tests.deploy.cloud.ray.faulty_worker import FaultyWorker
from tests.e2e.harness import ROOT, free_port, until
from tests.workers.contract import Endpoint

OBJECT_STORE_BYTES = 100 << 20
CPUS_PER_NODE = 3
PREFIX = "/embedded"
START_S = 120.0


class RayPool:
    """Tercet's application on a cluster of two nodes: the head, which the driver is connected to, and another."""

    def __init__(self, base: Path, /, **settings: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}{PREFIX}"
        self.key_path = base / "pool.key"
        self.write_keys(secrets.token_hex(32), secrets.token_hex(32))
        faults = {name: settings.pop(name) for name in list(settings) if name.startswith("test_")}
        self._worker_class = FaultyWorker if faults else WorkerReplica
        self.environ = {
            "PYTHONPATH": str(ROOT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",  # each is a Python that imports Ray
            "RAY_prestart_worker_first_driver": "0",
            "TERCET_DTYPE": "fp32",
            "TERCET_CACHE_MB": "64",
            "TERCET_POOL_KEY": str(self.key_path),
            "TERCET_RUN_DIR": str(base / "run"),
            **{f"TERCET_{name.upper()}": value for name, value in settings.items()},
            **{name.upper(): value for name, value in faults.items()},
        }

    def write_keys(self, *keys: str) -> None:
        """Replace the pool's keys, which the ingresses read within a second or two."""
        self.key_path.touch(mode=0o600)
        self.key_path.write_text("\n".join(keys))
        self.endpoint = Endpoint(self.url, keys)

    def start(self) -> None:
        os.environ.update(self.environ)
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": CPUS_PER_NODE,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
            },
        )
        self.start_node()
        ray.init(address=self.cluster.address, namespace="serve", log_to_driver=False, logging_level="WARNING")
        serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": self.port})

    def start_node(self) -> None:
        """The node beside the head joins the cluster."""
        self.node = self.cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=OBJECT_STORE_BYTES)

    def kill_node(self) -> None:
        """SIGKILL to every process of the node beside the head: its raylet, worker, ingress and proxy."""
        self.cluster.remove_node(self.node, allow_graceful=False)

    def deploy(self, **args: object) -> None:
        """Deploy the application anew with these arguments; returns when Serve has its replicas."""
        serve.run(application({"model": "embedded", **args}, self._worker_class), name="embedded", route_prefix=PREFIX)

    def wait_for_workers(self, number: int, timeout_s: float = START_S) -> float:
        """Wait until this number of workers is warm; returns seconds."""
        start = time.monotonic()
        until(lambda: self._num_workers() == number, timeout_s, f"{number} workers are warm")
        return time.monotonic() - start

    def _num_workers(self) -> int:
        # A node that is gone has reset the connection; while Serve deploys, the path may not exist yet.
        with suppress(httpx.TransportError, AssertionError):
            state = self.endpoint.state()
            return int(state["num_replicas"]) if state["state"] == "warm" else 0
        return 0

    def wait_for_status(self, path: str, key: str, status: int) -> None:
        """Wait until a request with this key has this status at each of the proxies."""

        def statuses() -> set[int]:
            found = set()
            for _ in range(8):  # on connections of their own, which the kernel spreads
                headers = {"Authorization": f"Bearer {key}"}
                found.add(httpx.post(self.url + path, json={"text": "a"}, headers=headers, trust_env=False).status_code)
            return found

        until(lambda: statuses() == {status}, 20, f"{path} is answered with {status}")

    def stop(self) -> None:
        self.endpoint.client.close()
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        gc.collect()  # Ray leaves files open, which would be reported after the last test


@contextmanager
def running_pool(base: Path, **settings: str) -> Iterator[RayPool]:
    """A cluster of two nodes without an application."""
    pool = RayPool(base, **settings)
    before = dict(os.environ)
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()
        os.environ.clear()
        os.environ.update(before)
