"""Fixtures of the tests of other projects' clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Tercet, running


@pytest.fixture(scope="package")
def tercet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """Two slots of the embedded checkpoint in fp32, shared by all tests of this directory."""
    with running(tmp_path_factory.mktemp("t"), models="embedded*2") as instance:
        yield instance


@pytest.fixture(scope="session")
def client_programs() -> Path:
    """The directory of the programs that `make test-clients` installs."""
    directory = ROOT / "build/clients/bin"
    if not (directory / "lm_eval").exists():
        pytest.fail("build/clients does not exist: run `make test-clients`")
    return directory
