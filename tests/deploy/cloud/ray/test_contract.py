"""The internal protocol through Ray's proxy, on a cluster of two nodes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.workers.contract import STEP_MS, Endpoint, ProtocolContract

if TYPE_CHECKING:
    from tests.deploy.cloud.ray.cluster import RayPool

# Ray's modules warn where they are imported, so a fixture imports them.
pytestmark = [pytest.mark.deploy, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
MAX_BATCH = 3


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayPool]:
    from tests.deploy.cloud.ray.cluster import running_pool

    with running_pool(tmp_path_factory.mktemp("ray"), test_step_delay_ms=f"0={STEP_MS}") as pool:
        pool.deploy(min_workers=2, max_workers=2, max_batch=MAX_BATCH)
        pool.wait_for_workers(2)
        yield pool


@pytest.fixture
def endpoint(pool: RayPool) -> Endpoint:
    return pool.endpoint


class TestRay(ProtocolContract):
    """Two workers and two ingresses behind two proxies."""

    def test_one_state_speaks_for_all_workers(self, endpoint: Endpoint) -> None:
        state = endpoint.state()
        assert (state["num_replicas"], state["max_batch"], state["pid"]) == (2, 2 * MAX_BATCH, 0)


def test_a_key_that_is_added_is_accepted_and_one_that_is_removed_is_not(pool: RayPool) -> None:
    before, after = pool.endpoint.keys[0], secrets.token_hex(32)
    for keys, accepted in (((before, after), {before, after}), ((after, before), {before, after}), ((after,), {after})):
        pool.write_keys(*keys)
        for key in (before, after):
            status = 200 if key in accepted else 401
            pool.wait_for_status("/tokenize", key, status)
