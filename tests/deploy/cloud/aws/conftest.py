"""The cloud of these tests: one server, and an empty account for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.cloud.aws.cloud import Cloud, running_cloud


@pytest.fixture(scope="session")
def running() -> Iterator[Cloud]:
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(running: Cloud) -> Cloud:
    """An account in which nothing exists."""
    running.reset()
    return running
