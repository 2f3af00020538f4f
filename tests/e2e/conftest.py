"""Fixtures of the end-to-end tests: the servers that several modules use, by what sets them apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.shared_servers import SharedServer
from tests.tls import Certificate

LISTED_ORIGIN = "https://notes.example"


@pytest.fixture
def tercet(server_with: Callable[..., SharedServer]) -> SharedServer:
    """Two slots of the embedded checkpoint, and a log at debug level."""
    return server_with(models="embedded*2", log="debug", origins=LISTED_ORIGIN)


@pytest.fixture
def slow(server_with: Callable[..., SharedServer]) -> SharedServer:
    """One slot with a batch of three, and room for another six branches in the queue.

    A step takes at least 20 ms: arrival times separate streamed text from buffered text, and a request of three
    branches and 256 tokens fills the slot for at least five seconds.
    """
    return server_with(max_batch="3", queue="6", test_step_delay_ms="0=20")


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("c"))


@pytest.fixture
def keyed(server_with: Callable[..., SharedServer], key_path: Path, key: str) -> SharedServer:
    """An instance that requires keys, started with a client's key in its environment."""
    return server_with(keys=str(key_path), log="debug", api_key=key)


@pytest.fixture
def secure(server_with: Callable[..., SharedServer], certificate: Certificate) -> SharedServer:
    """An instance that serves HTTPS."""
    return server_with(certificate)
