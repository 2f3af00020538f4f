"""The internal protocol of a worker that listens on TCP. `tests/deploy/ray` runs the same tests through Ray's proxy."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest

from tests.e2e.harness import START_S, Tercet, free_port, until
from tests.workers.contract import STEP_MS, Endpoint, ProtocolContract

MAX_BATCH = 4


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    base = tmp_path_factory.mktemp("protocol")
    key_path, port = base / "pool.key", free_port()
    endpoint = Endpoint(f"http://127.0.0.1:{port}", (secrets.token_hex(32), secrets.token_hex(32)))
    key_path.touch(mode=0o600)
    key_path.write_text("\n".join(endpoint.keys))
    workers = Tercet(
        base, pool_bind=f"127.0.0.1:{port}", pool_key=str(key_path), max_batch=str(MAX_BATCH),
        test_step_delay_ms=f"0={STEP_MS}",
    )  # fmt: skip
    workers.start(sys.executable, "-m", "deploy", "serve", "--role", "workers")

    def is_warm() -> bool:
        with suppress(httpx.TransportError):
            return endpoint.client.get(f"{endpoint.url}/health/ready").status_code == 200
        return False

    until(is_warm, START_S, f"the worker is warm; {workers.log()[-2000:]}")
    yield endpoint
    endpoint.client.close()
    assert workers.stop() == 0


class TestLocalWorker(ProtocolContract):
    """One worker, reached by TCP."""
