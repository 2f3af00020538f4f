"""Fixtures of the gateway's tests."""

from pathlib import Path

import pytest


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path leaves room for a socket's name."""
    return tmp_path_factory.mktemp("t")
