"""The cloud of these tests: one server, and an empty account for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.cloud.aws import deploy_commands
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


@pytest.fixture
def deployer(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """The account of `tercet deploy` in this process, which does not sleep: its polls count for the time."""
    for name, value in cloud.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(deploy_commands, "POLL_S", 300.0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return cloud
