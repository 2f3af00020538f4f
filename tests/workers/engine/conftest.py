"""Models that several test modules use; loading one takes longer than using it."""

from __future__ import annotations

import pytest

from tests.workers.engine.helpers import CHECKPOINT, TINY, peaked_weights
from workers.engine.gpt2 import LoadedModel, build, load_model


@pytest.fixture(scope="session")
def embedded() -> LoadedModel:
    return load_model(CHECKPOINT, dtype="fp32")


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return LoadedModel(build(TINY, peaked_weights(TINY)), "cpu", "fp32")
