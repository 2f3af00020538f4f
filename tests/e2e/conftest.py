"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Tercet, running


@pytest.fixture(scope="module")
def tercet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """Two slots of the embedded checkpoint, shared by a module's tests."""
    with running(tmp_path_factory.mktemp("t"), models="embedded*2") as instance:
        yield instance


@pytest.fixture
def short_tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path is short enough for Unix sockets in it."""
    return tmp_path_factory.mktemp("t")
