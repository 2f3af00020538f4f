"""A real worker that listens on TCP, without a gateway: `tercet serve --role workers`."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.e2e.harness import START_S, Tercet, until
from tests.workers.contract import Endpoint


@contextmanager
def running_tcp_worker(base: Path, port: int, **settings: str) -> Iterator[Endpoint]:
    """A warm worker at a port of the loopback, with two keys."""
    endpoint = Endpoint(f"http://127.0.0.1:{port}", (secrets.token_hex(32), secrets.token_hex(32)))
    key_path = base / "worker.key"
    key_path.touch(mode=0o600)
    key_path.write_text("\n".join(endpoint.keys))
    workers = Tercet(base, pool_bind=f"127.0.0.1:{port}", pool_key=str(key_path), **settings)
    workers.start(sys.executable, "-m", "deploy", "serve", "--role", "workers")

    def is_warm() -> bool:
        with suppress(httpx.TransportError):
            return endpoint.client.get(f"{endpoint.url}/health/ready").status_code == 200
        return False

    try:
        until(is_warm, START_S, f"the worker is warm; {workers.log()[-2000:]}")
        yield endpoint
    finally:
        endpoint.client.close()
        assert workers.stop() == 0
