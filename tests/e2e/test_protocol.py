"""The internal protocol of a worker that listens on TCP. `tests/deploy/ray` runs the same tests through Ray's proxy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import free_port
from tests.workers.contract import STEP_MS, Endpoint, ProtocolContract
from tests.workers.tcp_worker import running_tcp_worker


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    base = tmp_path_factory.mktemp("protocol")
    delay = f"0={STEP_MS}"
    with running_tcp_worker(base, free_port(), max_batch="4", test_step_delay_ms=delay) as endpoint:
        yield endpoint


class TestLocalWorker(ProtocolContract):
    """One worker, reached by TCP."""
