"""Where a branch goes: to its document's worker first, and never to a worker that has fallen silent."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.cloud.ray.pool_state import preferred

# Ray's modules warn where they are imported, so the tests import them.
pytestmark = [pytest.mark.deploy, pytest.mark.filterwarnings("ignore")]
NAMES = ("a", "b", "c", "d")


def ranks(session: str) -> list[list[str]]:
    """The names of the workers that are tried for a request, in this order."""
    from deploy.cloud.ray.router import DocumentRouter

    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in NAMES]
    request = SimpleNamespace(
        metadata=SimpleNamespace(session_id=session), routing_context=SimpleNamespace(should_backoff=False)
    )
    router = DocumentRouter.__new__(DocumentRouter)  # its choice needs none of Serve's state
    found: list[list[Any]] = asyncio.run(router.choose_replicas(replicas, request))
    assert request.routing_context.should_backoff
    return [[replica.replica_id.unique_id for replica in rank] for rank in found]


def test_the_worker_of_the_document_comes_first_and_then_two_others() -> None:
    for number in range(20):
        first, others = ranks(f"document {number}")
        assert first == [preferred(f"document {number}", NAMES)]
        assert len(set(others)) == 2


def test_a_branch_without_a_document_goes_to_one_of_two_workers() -> None:
    found = [ranks("") for _ in range(40)]
    assert all(len(two) == 2 for [two] in found)
    assert {name for [two] in found for name in two} == set(NAMES)


def test_a_silent_worker_is_left_out_while_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.cloud.ray import router
    from deploy.cloud.ray.pool_state import SILENCE_S, PoolState
    from tests.deploy.cloud.ray.test_pool_state import WARM

    pool = PoolState()
    monkeypatch.setattr(router, "POOL", pool)
    now = time.monotonic()
    for name in NAMES:
        pool.report_worker(name, WARM, now - SILENCE_S - 1)
    assert len(ranks("document")) == 2  # all are silent: the reports may be late
    pool.report_worker("b", WARM, now)
    assert ranks("document") == [["b"], ["b"]]
