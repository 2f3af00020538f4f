"""Models that several test modules use (loading one takes longer than using it), and a log without long tracebacks."""

from __future__ import annotations

import pytest
import structlog

from shared import cpu_features
from tests.workers.engine.helpers import CHECKPOINT, TINY, peaked_weights
from workers.engine.loader import LoadedModel, build, load_model
from workers.text.tokenizer import Tokenizer


@pytest.fixture(scope="session", autouse=True)
def _plain_log() -> None:
    """structlog's default renders each frame's variables, which takes the engine's thread a second."""
    structlog.configure(processors=[structlog.processors.format_exc_info, structlog.processors.JSONRenderer()])


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(CHECKPOINT, 8192)


@pytest.fixture(scope="session")
def embedded() -> LoadedModel:
    return load_model(CHECKPOINT, dtype="fp32")


@pytest.fixture(scope="session")
def embedded_int8() -> LoadedModel:
    return load_model(CHECKPOINT, dtype="int8")


@pytest.fixture(scope="session")
def tiny_of() -> dict[str, LoadedModel]:
    weights = peaked_weights(TINY)
    dtypes = ["fp32", "int8", *(["bf16"] if cpu_features.read().has_bf16 else [])]
    return {dtype: LoadedModel(build(TINY, weights, dtype), "cpu", dtype) for dtype in dtypes}


@pytest.fixture(scope="session")
def tiny(tiny_of: dict[str, LoadedModel]) -> LoadedModel:
    return tiny_of["fp32"]
