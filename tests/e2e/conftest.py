"""Fixtures of the end-to-end tests: the servers that several modules use, by what sets them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.shared_servers import SharedServer

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
