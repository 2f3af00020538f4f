"""A gateway on a pool of two Ray nodes, under load: a node is killed and returns (R17), and the pool is scaled."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.chaos.load import Load, count_failures
from tests.e2e.harness import Tercet, until

if TYPE_CHECKING:
    from tests.deploy.cloud.ray.cluster import RayPool

# Ray's modules warn where they are imported, so a fixture imports them.
pytestmark = [pytest.mark.deploy, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
STEP_MS = 10
MAX_BATCH = 6
NUM_CLIENTS = 3
PATIENCE_S = 300.0  # a worker loads beside the load on the other cores


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPool]:
    from tests.deploy.cloud.ray.cluster import running_pool

    with running_pool(tmp_path_factory.mktemp("ray"), test_step_delay_ms=f"0={STEP_MS}") as pool:
        yield pool


@contextmanager
def running_gateway(base: Path, pool: RayPool) -> Iterator[Tercet]:
    """A gateway, which starts whether or not the pool can be reached."""
    gateway = Tercet(base, pool=f"embedded={pool.url}", pool_key=str(pool.key_path), models="", ack_ms="3000")
    gateway.start(sys.executable, "-m", "deploy", "serve", "--role", "gateway")
    try:
        yield gateway
    finally:
        gateway.stop()


def wait_for_gateway(gateway: Tercet) -> None:
    until(gateway.slots, 60, f"the gateway has a slot; {gateway.log()[-2000:]}")
    gateway.wait_until_warm()


def report(load: Load, **figures: float) -> None:
    """Print for `pytest -s` what docs/RAY.md quotes."""
    figures = {name: round(value, 1) for name, value in figures.items()}
    counts = {"answers": len(load.answers), "failures": dict(count_failures(load.answers))}
    sys.stdout.write(f"\n{counts | figures}\n")


def test_a_node_killed_under_load_loses_no_request_and_its_capacity_returns(pool: RayPool, tmp_path: Path) -> None:
    """R17. Each node has CPUs for one worker, and the kernel gives each proxy its share of the connections."""
    from tests.deploy.cloud.ray.cluster import CPUS_PER_NODE

    with running_gateway(tmp_path, pool) as gateway:
        pool.deploy(min_workers=2, max_workers=2, max_batch=MAX_BATCH, num_cpus=CPUS_PER_NODE)
        pool.wait_for_workers(2)
        wait_for_gateway(gateway)
        load = Load(gateway.port, NUM_CLIENTS)
        with load.running():
            load.wait_for(20)
            pool.kill_node()
            killed_at = time.monotonic()
            pool.wait_for_workers(1)
            lost_s = time.monotonic() - killed_at
            load.wait_for(10, PATIENCE_S)
            pool.start_node()
            returned_s = pool.wait_for_workers(2, PATIENCE_S)
            load.wait_for(10)
        slowest_s = max(answer.seconds for answer in load.answers)
        report(load, lost_s=lost_s, returned_s=returned_s, slowest_s=slowest_s)
        assert not count_failures(load.answers), count_failures(load.answers)


def test_the_pool_grows_and_shrinks_under_load_without_a_failure(pool: RayPool, tmp_path: Path) -> None:
    with running_gateway(tmp_path, pool) as gateway:
        pool.deploy(
            min_workers=1,
            max_workers=3,
            max_batch=MAX_BATCH,
            target_ongoing=1,
            load_window_s=4,
            upscale_delay_s=1,
            downscale_delay_s=3,
        )
        pool.wait_for_workers(1, PATIENCE_S)
        wait_for_gateway(gateway)
        many, few = Load(gateway.port, 6), Load(gateway.port, 1, pause_s=4.0)
        with few.running():
            with many.running():
                grown_s = pool.wait_for_workers(3, PATIENCE_S)
                many.wait_for(20)
            shrunk_s = pool.wait_for_workers(1, PATIENCE_S)
            few.wait_for(2)
        report(many, grown_s=grown_s)
        report(few, shrunk_s=shrunk_s)
        assert not count_failures(many.answers + few.answers), count_failures(many.answers + few.answers)
