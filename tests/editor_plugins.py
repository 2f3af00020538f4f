"""What the tests of editors' plug-ins share: builds, and a server that requires a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.clients.plugins import install_tools
from shared.api_keys import new_key
from tests.e2e.harness import ROOT, Tercet, running
from tests.npm_package import NpmPackage, skipping_without_npm


def build_plugin(
    name: str, build: Callable[[Path, Path], Path], package: NpmPackage, request: pytest.FixtureRequest
) -> Path:
    """Build a plug-in in a folder of pytest's cache; skips the test if its tools cannot be installed."""
    assert request.config.cache is not None
    work = request.config.cache.mkdir(f"{name}-plugin")
    with skipping_without_npm():
        install_tools(name, work)
    return build(work, package.packed)


@contextmanager
def running_with_key(base: Path, origin: str = "") -> Iterator[tuple[Tercet, str]]:
    """A server and its key. Two models: `embedded`, and `slow`, the same with at least 100 ms per decode step."""
    key = new_key(base / "keys", "editor")[0]
    models = f"embedded,slow={ROOT}/workers/checkpoints/embedded"
    # No limit of requests: a slow start is polled with the key.
    keys = {"keys": str(base / "keys"), "api_key": key, "key_rate": "0"}
    with running(base, models=models, test_step_delay_ms="1=100", origins=origin, **keys) as tercet:
        yield tercet, key
